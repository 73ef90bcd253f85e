-- Who collects which tier of blobs, and which blobs are condemned.

local function collector_key(base, tier)
  return base .. ':collector:' .. tier
end

-- Nil when the tier is at `term`, else the refusal.
local function other_term(base, tier, term)
  local row = redis.call('HMGET', collector_key(base, tier), 'term', 'holder')
  if (row[1] or '0') == term then
    return nil
  end
  return {'STALE_TERM', row[1] or '0', row[2] or ''}
end

register_read('get_collector', function(base, take)
  return redis.call('HGETALL', collector_key(base, take()))
end)

register_read('list_collectors', function(base, take)
  local found = {}
  for i, tier in ipairs(redis.call('ZRANGE', base .. ':collectors', 0, -1)) do
    found[i] = {tier, redis.call('HGETALL', collector_key(base, tier))}
  end
  return found
end)

register_write('elect_collector', function(tx, take)
  local tier, holder, term = take(), take(), take()
  local key, refusal = collector_key(tx.base, tier), other_term(tx.base, tier, term)
  if refusal then
    return nil, refusal
  end
  redis.call('HINCRBY', key, 'term', 1)
  redis.call('HSET', key, 'holder', holder, 'counter', '1')
  redis.call('ZADD', tx.base .. ':collectors', 0, tier)
  return redis.call('HGETALL', key)
end)

register_write('renew_collector', function(tx, take)
  local tier, term = take(), take()
  local key, refusal = collector_key(tx.base, tier), other_term(tx.base, tier, term)
  if refusal then
    return nil, refusal
  end
  return {whole(redis.call('HINCRBY', key, 'counter', 1))}
end)

register_write('resign_collector', function(tx, take)
  local tier, term = take(), take()
  if not other_term(tx.base, tier, term) then
    redis.call('HSET', collector_key(tx.base, tier), 'holder', '')
  end
  return {}
end)

register_write('condemn', function(tx, take)
  local base, tier, term = tx.base, take(), take()
  local refusal = other_term(base, tier, term)
  if refusal then
    return nil, refusal
  end
  local digests = take_list(take)
  if #digests > 0 then
    redis.call('SADD', base .. ':tiers', tier)
  end
  for _, digest in ipairs(digests) do
    redis.call('ZADD', base .. ':condemned:' .. tier, 0, digest)
  end
  return {}
end)

register_write('absolve', function(tx, take)
  local base, tier, term = tx.base, take(), take()
  local refusal = other_term(base, tier, term)
  if refusal then
    return nil, refusal
  end
  for _, digest in ipairs(take_list(take)) do
    if redis.call('ZREM', base .. ':condemned:' .. tier, digest) == 1 then
      redis.call('ZADD', base .. ':absolved', redis.call('INCR', base .. ':absolutions'), digest)
    end
  end
  if redis.call('ZCARD', base .. ':condemned:' .. tier) == 0 then
    redis.call('SREM', base .. ':tiers', tier)
  end
  return {}
end)

register_read('list_condemned', function(base, take)
  local tier, after, limit = take(), take(), take()
  local from = after == '' and '-' or '(' .. after
  return redis.call('ZRANGE', base .. ':condemned:' .. tier, from, '+', 'BYLEX', 'LIMIT', 0, limit)
end)

register_read('absolutions', function(base, take)
  return redis.call('GET', base .. ':absolutions') or '0'
end)

register_write('forget_absolutions', function(tx, take)
  local base, upto = tx.base, tonumber(take())
  upto = math.min(upto, tonumber(redis.call('GET', base .. ':absolutions') or '0'))
  redis.call('ZREMRANGEBYSCORE', base .. ':absolved', '-inf', whole(upto))
  if upto > tonumber(redis.call('GET', base .. ':forgotten') or '0') then
    redis.call('SET', base .. ':forgotten', whole(upto))
  end
  return {}
end)
