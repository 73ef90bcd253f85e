-- The token log: one stream a branch, whose entry ids are the records' starts; and generations.
-- BLAKE3 is not to be had here. A caller computes the chain at the new head from the one it knows, and sends both: the
-- function compares what it knows with the row, and nothing happens when it was wrong.

local function log_key(base, branch)
  return base .. ':log:' .. branch
end

local function generation_key(base, session, generation)
  return base .. ':generation:' .. session .. ':' .. generation
end

-- The head that a caller knows, the one that it makes of it, and the records between, a list of start and bytes. The
-- first argument is branch, head, new head and number of records.
local function take_proposal(take)
  local branch, head, new_head, count = string.match(take(), '^(%d*) (%-?%d+) (%-?%d+) (%d+)$')
  local known, new, records = {branch = branch, head = head, chain = take()}, {head = new_head, chain = take()}, {}
  for i = 1, 2 * tonumber(count) do
    records[i] = take()
  end
  return known, new, records
end

local function knows(known, branch, head, chain)
  return known.branch == branch and known.head == head and known.chain == chain
end

-- Adds records. False, with nothing written, when the log goes on behind the head.
local function add_records(base, branch, records)
  local key = log_key(base, branch)
  for i = 1, #records, 2 do
    local added = redis.pcall('XADD', key, records[i] .. '-1', 'r', records[i + 1])
    if type(added) == 'table' and added.err then
      if i == 1 and string.find(added.err, 'equal or smaller', 1, true) then
        return false
      end
      error(added)
    end
  end
  return true
end

-- What of a call's expectation does not hold; '' expects nothing. `hash` is the head's.
local function unexpected(head, hash, position, expected_hash)
  return (position ~= '' and position ~= head) or (expected_hash ~= '' and expected_hash ~= hash)
end

-- append and begin_generation. `opens`: the generation stays open.
local function extend(tx, take, opens)
  local base, session, epoch = tx.base, take(), take()
  local position, expected_hash, known_hash = take(), take(), take()
  local known, new, records = take_proposal(take)
  local generation, fields, token = take(), take_list(take), take()
  local row, refusal = held(base, session, epoch, 'generation', 'branch', 'head', 'chain', 'rewound')
  if not row then
    return nil, refusal
  end
  local open, branch, head, chain, rewound = unpack(row, 2)
  if open ~= '' then
    return nil, {'BUSY', open, head}
  end
  if not knows(known, branch, head, chain) then
    return nil, {'MOVED', branch, head, chain}
  end
  if unexpected(head, known_hash, position, expected_hash) then
    return nil, {'UNEXPECTED', head, rewound}
  end
  if generation ~= '' then
    if (opens and new.head or head) == '0' then
      return nil, {'EMPTY'}
    end
    if redis.call('EXISTS', generation_key(base, session, generation)) == 1 then
      return nil, {'GENERATION_EXISTS'}
    end
  end
  if opens and not is_listed(tx, token) then
    return nil, {'UNLISTED'}
  end
  if not add_records(base, branch, records) then
    return nil, {'LOG_GOES_ON', head}
  end
  local key = session_key(base, session)
  if #records > 0 or opens then
    redis.call('HSET', key, 'head', new.head, 'chain', new.chain, 'update', tx.now)
  end
  if generation ~= '' then
    local start = opens and new.head or head
    redis.call('HSET', generation_key(base, session, generation), 'branch', branch, 'start', start)
    set_fields(generation_key(base, session, generation), fields)
    if not opens then
      redis.call('HSET', generation_key(base, session, generation), 'end', new.head)
    end
    redis.call('ZADD', base .. ':generations:' .. branch, start, generation)
  end
  if opens then
    redis.call('HSET', key, 'generation', generation)
    redis.call('ZADD', base .. ':open', 0, session)
  end
  return {head, new.head, take(), epoch, branch, generation}
end

register_write('append', function(tx, take) return extend(tx, take, false) end)
register_write('begin_generation', function(tx, take) return extend(tx, take, true) end)

-- Nil when the commit was written, else its status and the session's row as it is.
local function commit_one(base, now, take)
  local session, epoch, generation, finished = take(), take(), take(), take()
  local known, new, records = take_proposal(take)
  local key = session_key(base, session)
  local row = redis.call('HMGET', key, 'epoch', 'generation', 'branch', 'head', 'chain', 'owner')
  if not row[1] then
    return {'MISSING'}
  end
  local status
  if row[1] ~= epoch or row[6] == '' then
    status = 'STALE_EPOCH'
  elseif row[4] ~= known.head or row[2] ~= generation then
    status = 'CONFLICT'
  elseif not knows(known, row[3], row[4], row[5]) then
    status = 'MOVED'
  elseif not add_records(base, row[3], records) then
    status = 'LOG_GOES_ON'
  end
  if status then
    return {status, row[1], row[3], row[4], row[5]}
  end
  redis.call('HSET', key, 'head', new.head, 'chain', new.chain, 'update', now)
  if finished ~= '' then
    finish(base, session, generation, finished, new.head)
  end
  return nil
end

-- Arguments: now, number of sessions, and for each its commit. Replies with what was not committed: {index, status and
-- the session's row as it is}.
redis.register_function('@PREFIX@_commit_step', function(keys, args)
  local take, outcomes = reader(args, 2), {}
  for i = 1, tonumber(take()) do
    local outcome = commit_one(keys[1], args[1], take)
    if outcome then
      outcomes[#outcomes + 1] = {whole(i), unpack(outcome)}
    end
  end
  return outcomes
end)
