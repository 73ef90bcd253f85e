-- Sessions: names that point at branches, with an owner, an epoch and a head.

local function session_key(base, session)
  return base .. ':session:' .. session
end

-- The named fields of a session that is not deleted, or nil and why not.
local function live(base, session, ...)
  local row = redis.call('HMGET', session_key(base, session), 'state', ...)
  if not row[1] then
    return nil, {'MISSING', session}
  end
  if row[1] == 'DELETED' then
    return nil, {'DELETED', session}
  end
  table.remove(row, 1)
  for i = 1, select('#', ...) do
    row[i] = row[i] or ''
  end
  return row
end

-- As live, when the session is at `epoch`; the epoch is the first field.
local function owned(base, session, epoch, ...)
  local row, refusal = live(base, session, 'epoch', ...)
  if row and row[1] ~= epoch then
    return nil, {'STALE_EPOCH', row[1]}
  end
  return row, refusal
end

-- As owned, when the owner has not released it.
local function held(base, session, epoch, ...)
  local row, refusal = owned(base, session, epoch, 'owner', ...)
  if row and table.remove(row, 2) == '' then
    return nil, {'STALE_EPOCH', epoch}
  end
  return row, refusal
end

-- The owner's word that the session may go is no more.
local function end_migration(base, session)
  redis.call('HDEL', session_key(base, session), 'migration', 'target')
end

local function change(tx, session, fields)
  local key = session_key(tx.base, session)
  set_fields(key, fields)
  redis.call('HSET', key, 'update', tx.now)
  return {session, redis.call('HGETALL', key)}
end

local function add_branch(base, parent, begin)
  local branch = whole(redis.call('HINCRBY', base .. ':workflow', 'branch', 1))
  redis.call('HSET', base .. ':branches', branch, parent .. ' ' .. begin)
  return branch
end

-- A session on a branch of its own, and its row; `birth` is parent branch, head and chain, `fields` all the rest.
local function insert(tx, session, birth, fields)
  local base, key = tx.base, session_key(tx.base, session)
  local branch = add_branch(base, birth.branch, birth.head)
  redis.call('HSET', key, 'branch', branch, 'state', 'ACTIVE', 'reason', '', 'epoch', '0', 'owner', '',
    'head', birth.head, 'chain', birth.chain, 'rewound', '0', 'fork', birth.head,
    'create', tx.now, 'update', tx.now, 'revision', '1')
  set_fields(key, fields)
  redis.call('ZADD', base .. ':sessions', 0, session)
  redis.call('ZADD', base .. ':live', 0, session)
  return {session, redis.call('HGETALL', key)}
end

local function check_new(base, session)
  if not workflow_is_live(base) then
    return {'NO_WORKFLOW'}
  end
  if redis.call('EXISTS', session_key(base, session)) == 1 then
    return {'EXISTS', session}
  end
  return nil
end

-- Ends the session's open generation, if there is one, at its head.
local function finish(base, session, generation, reason, head)
  redis.call('HSET', base .. ':generation:' .. session .. ':' .. generation, 'finish', reason, 'end', head)
  redis.call('HDEL', session_key(base, session), 'generation')
  redis.call('ZREM', base .. ':open', session)
end

register_write('create_session', function(tx, take)
  local session, root = take(), take()
  local refusal = check_new(tx.base, session)
  if refusal then
    return nil, refusal
  end
  return insert(tx, session, {branch = '', head = '0', chain = root}, take_list(take))
end)

register_write('update_session', function(tx, take)
  local session, revision, fields = take(), take(), take_list(take)
  local row, refusal = live(tx.base, session, 'revision')
  if not row then
    return nil, refusal
  end
  if revision ~= '' and revision ~= row[1] then
    return nil, {'ETAG', row[1]}
  end
  redis.call('HINCRBY', session_key(tx.base, session), 'revision', 1)
  return change(tx, session, fields)
end)

register_write('delete_session', function(tx, take)
  local session, purge = take(), take()
  local row, refusal = live(tx.base, session, 'generation', 'head')
  if not row then
    return nil, refusal
  end
  if row[1] ~= '' then
    finish(tx.base, session, row[1], 'CANCELLED', row[2])
  end
  local key = session_key(tx.base, session)
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HINCRBY', key, 'revision', 1)
  redis.call('ZREM', tx.base .. ':live', session)
  end_migration(tx.base, session)
  return change(tx, session,
    {'state', 'DELETED', 'reason', '', 'owner', '', 'delete', tx.now, 'purge', purge})
end)

register_write('undelete_session', function(tx, take)
  local session = take()
  local key = session_key(tx.base, session)
  local state = redis.call('HGET', key, 'state')
  if not state then
    return nil, {'MISSING', session}
  end
  if not workflow_is_live(tx.base) then
    return nil, {'NO_WORKFLOW'}
  end
  if state ~= 'DELETED' then
    return nil, {'NOT_DELETED'}
  end
  redis.call('HDEL', key, 'delete', 'purge')
  redis.call('HINCRBY', key, 'revision', 1)
  redis.call('ZADD', tx.base .. ':live', 0, session)
  return change(tx, session, {'state', 'PAUSED'})
end)

register_write('acquire', function(tx, take)
  local session, epoch, owner = take(), take(), take()
  local row, refusal = owned(tx.base, session, epoch, 'owner', 'head', 'takeovers', 'takeover_head', 'generation')
  if not row then
    return nil, refusal
  end
  local fields, head = {'owner', owner, 'state', 'ACTIVE', 'reason', ''}, row[3]
  if row[2] ~= '' and row[2] ~= owner and row[6] ~= '' then
    local takeovers = head == row[5] and tonumber(row[4]) or 0
    for _, value in ipairs({'takeovers', whole(takeovers + 1), 'takeover_head', head}) do
      table.insert(fields, value)
    end
  end
  redis.call('HINCRBY', session_key(tx.base, session), 'epoch', 1)
  end_migration(tx.base, session)
  return change(tx, session, fields)
end)

register_write('release', function(tx, take)
  local session, epoch = take(), take()
  local fields = take_list(take)
  local row, refusal = held(tx.base, session, epoch, 'generation', 'head')
  if not row then
    return nil, refusal
  end
  for at = 1, #fields, 2 do
    if fields[at] == 'state' and fields[at + 1] == 'PAUSED' and row[2] ~= '' then
      return nil, {'BUSY', row[2], row[3]}
    end
  end
  end_migration(tx.base, session)
  return change(tx, session, fields)
end)

register_write('release_quarantine', function(tx, take)
  local session = take()
  local row, refusal = live(tx.base, session, 'state')
  if not row then
    return nil, refusal
  end
  if row[1] ~= 'QUARANTINED' then
    return nil, {'NOT_QUARANTINED'}
  end
  end_migration(tx.base, session)
  return change(tx, session, {'owner', '', 'state', 'ACTIVE', 'reason', '', 'takeovers', '0'})
end)

register_write('note_numerics', function(tx, take)
  local session, epoch = take(), take()
  local row, refusal = held(tx.base, session, epoch)
  if not row then
    return nil, refusal
  end
  return change(tx, session, take_list(take))
end)

-- Up to `limit` sessions whose id sorts after `after`: {id, fields}. `index`: live or sessions.
register_read('list_sessions', function(base, take)
  local index, after, limit, found = take(), take(), take(), {}
  local from = after == '' and '-' or '(' .. after
  for i, session in ipairs(redis.call('ZRANGE', base .. ':' .. index, from, '+', 'BYLEX', 'LIMIT', 0, limit)) do
    found[i] = {session, redis.call('HGETALL', session_key(base, session))}
  end
  return found
end)
