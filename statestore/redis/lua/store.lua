-- What belongs to no workflow: the store's marker and its nodes.

-- Arguments: fields of the marker. Replies with the fields of the one that the store was made with.
register_write('open_store', function(tx, take)
  local key = tx.base .. ':marker'
  if redis.call('EXISTS', key) == 0 then
    set_fields(key, take_list(take))
  end
  return redis.call('HGETALL', key)
end)

-- Makes a store of an older version one of this one: what this version keeps besides, every row may lack.
register_write('upgrade_store', function(tx, take)
  local key, from, to = tx.base .. ':marker', take(), take()
  if redis.call('HGET', key, 'schema') == from then
    redis.call('HSET', key, 'schema', to)
  end
  return redis.call('HGETALL', key)
end)

local function node_key(base, incarnation)
  return base .. ':node:' .. incarnation
end

register_write('register_node', function(tx, take)
  local incarnation, fields = take(), take_list(take)
  local key = node_key(tx.base, incarnation)
  if redis.call('EXISTS', key) == 1 then
    return nil, {'EXISTS', incarnation}
  end
  set_fields(key, fields)
  redis.call('HSET', key, 'counter', '1')
  redis.call('ZADD', tx.base .. ':nodes', redis.call('INCR', tx.base .. ':registered'), incarnation)
  return {}
end)

register_write('renew_lease', function(tx, take)
  local incarnation, status = take(), take()
  local key = node_key(tx.base, incarnation)
  if redis.call('EXISTS', key) == 0 then
    return nil, {'MISSING', incarnation}
  end
  if status ~= '' then
    redis.call('HSET', key, 'status', status)
  end
  return {whole(redis.call('HINCRBY', key, 'counter', 1))}
end)

register_write('remove_node', function(tx, take)
  local incarnation = take()
  redis.call('DEL', node_key(tx.base, incarnation))
  redis.call('ZREM', tx.base .. ':nodes', incarnation)
  return {}
end)

register_read('list_nodes', function(base, take)
  local found = {}
  for i, incarnation in ipairs(redis.call('ZRANGE', base .. ':nodes', 0, -1)) do
    found[i] = {incarnation, redis.call('HGETALL', node_key(base, incarnation))}
  end
  return found
end)

register_write('list_workflow', function(tx, take)
  redis.call('ZADD', tx.base .. ':workflows', 0, take())
  return {}
end)

-- Lists a workflow among those that may have open generations.
register_write('list_generating', function(tx, take)
  redis.call('SADD', tx.base .. ':generating', take())
  return {}
end)

register_write('unlist_generating', function(tx, take)
  redis.call('SREM', tx.base .. ':generating', take())
  return {}
end)
