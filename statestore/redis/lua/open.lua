-- Sessions with an open generation. Those of a workflow are a set in its slot; which workflows have such a set is known
-- in the store's slot, as entries of workflow and token. A workflow is listed while its row holds the token of an entry
-- that is there: the entry comes first and goes last, and a token that went never counts again.

local function is_listed(tx, token)
  local key = workflow_key(tx.base)
  if redis.call('HGET', key, 'listed') then
    return true
  end
  if token == '' or redis.call('EXISTS', tx.base .. ':unlisted:' .. token) == 1 then
    return false
  end
  redis.call('HSET', key, 'listed', token)
  return true
end

register_write('unlist', function(tx, take)
  local token, key = take(), workflow_key(tx.base)
  if redis.call('HGET', key, 'listed') == token then
    if redis.call('ZCARD', tx.base .. ':open') > 0 then
      return nil, {'IN_USE'}
    end
    redis.call('HDEL', key, 'listed')
  end
  redis.call('SET', tx.base .. ':unlisted:' .. token, '1', 'PX', whole(KEEP_MS))
  return {}
end)

register_read('list_open', function(base, take)
  local found = {}
  for i, session in ipairs(redis.call('ZRANGE', base .. ':open', 0, -1)) do
    found[i] = {session, redis.call('HGETALL', session_key(base, session))}
  end
  return found
end)
