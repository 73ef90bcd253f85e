-- Manifests, the references that checkpoints hold to them, and pins. A manifest's key is POINT NUMERICS, its point
-- HASH:POSITION, the hash in hex.

local function manifest_key(base, key)
  return base .. ':manifest:' .. key
end

local function is_held(base, key)
  return redis.call('SCARD', base .. ':references:' .. key) > 0 or redis.call('SCARD', base .. ':pinned:' .. key) > 0
end

-- Which of `digests` a checkpoint may not name: condemned by a tier's collector now, or since `since` (a number of the
-- sequence of absolutions; when absolutions behind it were forgotten, all of them).
local function refused_digests(base, digests, since)
  local refused, seen = {}, {}
  local function refuse(digest)
    if not seen[digest] then
      seen[digest] = true
      refused[#refused + 1] = digest
    end
  end
  if tonumber(redis.call('GET', base .. ':forgotten') or '0') > since then
    return digests
  end
  local tiers = redis.call('SMEMBERS', base .. ':tiers')
  for _, digest in ipairs(digests) do
    for _, tier in ipairs(tiers) do
      if redis.call('ZSCORE', base .. ':condemned:' .. tier, digest) then
        refuse(digest)
      end
    end
    local absolved = redis.call('ZSCORE', base .. ':absolved', digest)
    if absolved and tonumber(absolved) > since then
      refuse(digest)
    end
  end
  return refused
end

register_write('put_manifest', function(tx, take)
  local base, point, numerics, manifest = tx.base, take(), take(), take()
  local replace, reference, since, digests = take(), take(), tonumber(take()), take_list(take)
  local refused = refused_digests(base, digests, since)
  if #refused > 0 then
    return nil, {'CONDEMNED', refused}
  end
  local key = point .. ' ' .. numerics
  if replace == '1' or redis.call('EXISTS', manifest_key(base, key)) == 0 then
    local number = whole(redis.call('INCR', base .. ':manifests-put'))
    redis.call('HSET', manifest_key(base, key), 'manifest', manifest, 'create', tx.now, 'number', number)
    redis.call('ZADD', base .. ':manifests', number, key)
    redis.call('ZADD', base .. ':point:' .. point, 0, numerics)
  end
  redis.call('SADD', base .. ':references:' .. key, reference)
  return {}
end)

-- Arguments: number of references, and for each the manifest's key and the reference.
register_write('drop_references', function(tx, take)
  for _ = 1, tonumber(take()) do
    local key = take()
    redis.call('SREM', tx.base .. ':references:' .. key, take())
  end
  return {}
end)

register_write('remove_manifest', function(tx, take)
  local base, point, numerics = tx.base, take(), take()
  local key = point .. ' ' .. numerics
  if is_held(base, key) or redis.call('DEL', manifest_key(base, key)) == 0 then
    return nil, {'NOT_REMOVED'}
  end
  redis.call('ZREM', base .. ':manifests', key)
  redis.call('ZREM', base .. ':point:' .. point, numerics)
  return {}
end)

register_read('get_manifest', function(base, take)
  return redis.call('HGET', manifest_key(base, take()), 'manifest')
end)

-- Arguments: points. Replies: {key, fields} of every manifest there.
register_read('find_manifests', function(base, take)
  local found = {}
  for _, point in ipairs(take_list(take)) do
    for _, numerics in ipairs(redis.call('ZRANGE', base .. ':point:' .. point, 0, -1)) do
      local key = point .. ' ' .. numerics
      found[#found + 1] = {key, redis.call('HGETALL', manifest_key(base, key))}
    end
  end
  return found
end)

-- Up to `limit` manifests whose number is above `after`, ascending: {key, fields, whether it is held}.
register_read('scan_manifests', function(base, take)
  local after, limit, found = take(), take(), {}
  local keys = redis.call('ZRANGE', base .. ':manifests', '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, limit)
  for i, key in ipairs(keys) do
    found[i] = {key, redis.call('HGETALL', manifest_key(base, key)), is_held(base, key) and '1' or '0'}
  end
  return found
end)

register_write('pin', function(tx, take)
  local base, pin, key, holder = tx.base, take(), take(), take()
  if redis.call('EXISTS', manifest_key(base, key)) == 0 then
    return nil, {'NO_MANIFEST'}
  end
  local before = redis.call('HGET', base .. ':pin:' .. pin, 'key')
  if before then
    redis.call('SREM', base .. ':pinned:' .. before, pin)
  end
  redis.call('HSET', base .. ':pin:' .. pin, 'key', key, 'holder', holder, 'create', tx.now)
  redis.call('SADD', base .. ':pinned:' .. key, pin)
  redis.call('ZADD', base .. ':pins', 0, pin)
  return {}
end)

register_write('unpin', function(tx, take)
  local base, pin = tx.base, take()
  local key = redis.call('HGET', base .. ':pin:' .. pin, 'key')
  if key then
    redis.call('SREM', base .. ':pinned:' .. key, pin)
    redis.call('DEL', base .. ':pin:' .. pin)
    redis.call('ZREM', base .. ':pins', pin)
  end
  return {}
end)

register_read('list_pins', function(base, take)
  local found = {}
  for i, pin in ipairs(redis.call('ZRANGE', base .. ':pins', 0, -1)) do
    found[i] = {pin, redis.call('HGETALL', base .. ':pin:' .. pin)}
  end
  return found
end)
