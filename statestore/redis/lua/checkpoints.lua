-- Checkpoints of sessions. Their manifests lie in the store's slot: a manifest and a reference to it are put before the
-- checkpoint that names it, and go after it, so that what breaks off between leaves a reference too many, never a
-- checkpoint without manifest. References have names of their own: one that goes is never another checkpoint's. Those
-- of removed checkpoints are kept in a set until the store's slot has let them go.

local function checkpoint_key(base, session, checkpoint)
  return base .. ':checkpoint:' .. session .. ':' .. checkpoint
end

local function remove_checkpoint(base, session, checkpoint)
  local key = checkpoint_key(base, session, checkpoint)
  local row = redis.call('HGETALL', key)
  if #row == 0 then
    return row
  end
  local at = redis.call('HMGET', key, 'chain', 'grid', 'numerics', 'reference')
  local hex = string.gsub(at[1], '.', function(byte) return string.format('%02x', string.byte(byte)) end)
  redis.call('SADD', base .. ':unreferenced', hex .. ':' .. at[2] .. ' ' .. at[3] .. '\n' .. at[4])
  redis.call('DEL', key)
  redis.call('ZREM', base .. ':checkpoints:' .. session, checkpoint)
  redis.call('ZREM', base .. ':checkpoint-names', session .. ' ' .. checkpoint)
  return row
end

local function cancelled_key(base, reference)
  return base .. ':cancelled:' .. reference
end

-- A reference that no checkpoint holds may be a put's that is under way. From here on it is none: such a put is refused.
register_write('cancel_reference', function(tx, take)
  local session, checkpoint, reference = take(), take(), take()
  if redis.call('HGET', checkpoint_key(tx.base, session, checkpoint), 'reference') == reference then
    return nil, {'HELD'}
  end
  redis.call('SET', cancelled_key(tx.base, reference), '', 'PX', whole(365 * 24 * 3600 * 1000))
  return {}
end)

-- `known`: the branch on which the caller found the checkpoint's hash to be right.
register_write('put_checkpoint', function(tx, take)
  local base, session, epoch, known = tx.base, take(), take(), take()
  local checkpoint, position, grid_position, reference = take(), take(), take(), take()
  local fields = take_list(take)
  local row, refusal = owned(base, session, epoch, 'branch', 'head')
  if not row then
    return nil, refusal
  end
  if tonumber(position) > tonumber(row[3]) then
    return nil, {'BEYOND', position, row[3]}
  end
  if known ~= row[2] then
    return nil, {'MOVED'}
  end
  local key = checkpoint_key(base, session, checkpoint)
  if redis.call('EXISTS', key) == 1 then
    return nil, {'CHECKPOINT_EXISTS'}
  end
  if redis.call('EXISTS', cancelled_key(base, reference)) == 1 then
    return nil, {'CANCELLED'}
  end
  redis.call('HSET', key, 'branch', row[2], 'position', position, 'grid', grid_position, 'create', tx.now,
    'reference', reference)
  set_fields(key, fields)
  redis.call('ZADD', base .. ':checkpoints:' .. session, grid_position, checkpoint)
  redis.call('ZADD', base .. ':checkpoint-names', 0, session .. ' ' .. checkpoint)
  return {session, checkpoint, redis.call('HGETALL', key)}
end)

register_write('delete_checkpoint', function(tx, take)
  local base, session, checkpoint = tx.base, take(), take()
  local row, refusal = live(base, session)
  if not row then
    return nil, refusal
  end
  if redis.call('EXISTS', checkpoint_key(base, session, checkpoint)) == 0 then
    return nil, {'NO_CHECKPOINT'}
  end
  return {session, checkpoint, remove_checkpoint(base, session, checkpoint)}
end)

register_write('let_go', function(tx, take)
  for _, reference in ipairs(take_list(take)) do
    redis.call('SREM', tx.base .. ':unreferenced', reference)
  end
  return {}
end)

-- Removes checkpoints, unless a session was made or rewound since the caller looked; those that are gone are left out.
register_write('drop_checkpoints', function(tx, take)
  local base, lineage = tx.base, take()
  if (redis.call('HGET', workflow_key(base), 'branch') or '0') ~= lineage then
    return nil, {'LINEAGE'}
  end
  for _ = 1, tonumber(take()) do
    local session, checkpoint = take(), take()
    remove_checkpoint(base, session, checkpoint)
  end
  return {}
end)

-- Whether a grid point of `branch` is known to be the same point of the chain that `parts` make up.
local function shared(parts, branch, grid_position)
  for _, part in ipairs(parts) do
    if part[1] == branch then
      return grid_position <= part[3]
    end
  end
  return false
end

-- Adds the checkpoints made under a session's name with grid points up to `limit`, the highest first: {session, id,
-- fields, whether the point is known to lie on the chain of `parts`}. Of the others only the hash can tell. `enough`:
-- what comes below the first that is known is left out.
local function add_checkpoints(base, session, limit, parts, enough, numerics, found)
  local ids, known_at = redis.call('ZRANGE', base .. ':checkpoints:' .. session, limit, '-inf', 'BYSCORE', 'REV'), nil
  for _, checkpoint in ipairs(ids) do
    local key = checkpoint_key(base, session, checkpoint)
    local at = redis.call('HMGET', key, 'branch', 'grid', 'numerics')
    local grid_position = tonumber(at[2] or '')
    if grid_position and (numerics == '' or numerics == at[3]) then
      if enough and known_at and grid_position < known_at then
        return
      end
      local known = shared(parts, at[1], grid_position)
      known_at = known_at or (known and grid_position) or nil
      found[#found + 1] = {session, checkpoint, redis.call('HGETALL', key), known and '1' or '0'}
    end
  end
end

register_read('list_checkpoints', function(base, take)
  local session = take()
  local row, refusal = live(base, session, 'branch', 'head')
  if not row then
    return refusal
  end
  local found = {}
  add_checkpoints(base, session, row[2], ancestry(base, row[1], tonumber(row[2]), -1), false, '', found)
  return {'OK', found}
end)

-- Arguments: session, position, numerics id ('' for any). Replies with the checkpoints made under its name, and under those of the sessions it
-- descends from at what it may share with them; the highest of each maker first. Also of a deleted session.
register_read('nearest_checkpoint', function(base, take)
  local session, limit, numerics = take(), tonumber(take()), take()
  local row = redis.call('HMGET', session_key(base, session), 'branch', 'head')
  if not row[1] then
    return {'MISSING', session}
  end
  local head, found, seen = tonumber(row[2]), {}, {}
  local parts = ancestry(base, row[1], head, -1)
  limit = math.min(limit, head)
  while session and not seen[session] do
    seen[session] = true
    add_checkpoints(base, session, whole(limit), parts, true, numerics, found)
    local up = redis.call('HMGET', session_key(base, session), 'parent', 'fork')
    session, limit = up[1], math.min(limit, tonumber(up[2] or '0'))
  end
  return {'OK', found}
end)

register_read('get_checkpoint', function(base, take)
  local session, checkpoint = take(), take()
  local row, refusal = live(base, session)
  if not row then
    return refusal
  end
  return {'OK', session, checkpoint, redis.call('HGETALL', checkpoint_key(base, session, checkpoint))}
end)

-- Checkpoints of a workflow behind (session, checkpoint), ascending: {session, checkpoint, fields}.
register_read('scan_checkpoints', function(base, take)
  local after, limit, found = take(), take(), {}
  local from = after == '' and '-' or '(' .. after
  local names = redis.call('ZRANGE', base .. ':checkpoint-names', from, '+', 'BYLEX', 'LIMIT', 0, limit)
  for i, name in ipairs(names) do
    local session, checkpoint = string.match(name, '^(%S+) (%S+)$')
    found[i] = {session, checkpoint, redis.call('HGETALL', checkpoint_key(base, session, checkpoint))}
  end
  return found
end)

register_read('lineage', function(base, take)
  return redis.call('HGET', workflow_key(base), 'branch') or '0'
end)
