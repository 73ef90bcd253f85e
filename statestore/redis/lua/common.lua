-- What every function shares. Keys: KEYS[1] is the base of all keys that a function touches, which lie in its slot; the
-- keys that it may write are named behind it, so that a slot in migration is noticed before anything is done. Nothing
-- is written before every check has passed: Redis undoes nothing when a function fails.

local KEEP_US = @KEEP_US@
local KEEP_MS = KEEP_US / 1000 + 3600 * 1000

local function whole(number)
  return string.format('%.0f', number)
end

-- The arguments from `index` on, one by one.
local function reader(args, index)
  return function()
    index = index + 1
    return args[index - 1]
  end
end

local function take_list(take)
  local list = {}
  for i = 1, tonumber(take()) do
    list[i] = take()
  end
  return list
end

local function set_fields(key, fields)
  if #fields > 0 then
    redis.call('HSET', key, unpack(fields))
  end
end

local function register_read(name, body)
  redis.register_function{
    function_name = '@PREFIX@_' .. name,
    callback = function(keys, args) return body(keys[1], reader(args, 1)) end,
    flags = {'no-writes'},
  }
end

local function stored_answer(key, now, digest, call)
  local stored = redis.call('HMGET', key, 'create', 'digest', 'call', 'answer')
  if not stored[1] or tonumber(stored[1]) <= now - KEEP_US then
    return nil
  end
  if stored[2] ~= digest or (call and call ~= stored[3]) then
    return {'REUSED'}
  end
  return {'REPLAYED', stored[3], cmsgpack.unpack(stored[4])}
end

local function request_key(base, request)
  return base .. ':request:' .. request
end

-- Registers a function that writes. Arguments: now, request ('' for none), the request's digest, then the body's own.
-- The body returns its answer, or nil and why it refused, with nothing written. Replies: {'OK', answer},
-- {'REPLAYED', call, answer}, {'REUSED'}, or the refusal.
local function register_write(name, body)
  redis.register_function('@PREFIX@_' .. name, function(keys, args)
    local tx = {base = keys[1], now = args[1]}
    local request, digest = args[2], args[3]
    if request ~= '' then
      local stored = stored_answer(request_key(tx.base, request), tonumber(tx.now), digest, name)
      if stored then
        return stored
      end
    end
    local answer, refusal = body(tx, reader(args, 4))
    if not answer then
      return refusal
    end
    if request ~= '' then
      local key = request_key(tx.base, request)
      redis.call('HSET', key, 'create', tx.now, 'digest', digest, 'call', name, 'answer', cmsgpack.pack(answer))
      redis.call('PEXPIRE', key, whole(KEEP_MS))
    end
    return {'OK', answer}
  end)
end

register_read('find_request', function(base, take)
  local request, now, digest = take(), tonumber(take()), take()
  return stored_answer(request_key(base, request), now, digest, nil) or {'NONE'}
end)
