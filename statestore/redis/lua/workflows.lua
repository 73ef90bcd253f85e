-- A workflow's own row.

local function workflow_key(base)
  return base .. ':workflow'
end

local function workflow_is_live(base)
  local row = redis.call('HMGET', workflow_key(base), 'revision', 'delete')
  return row[1] and not row[2]
end

register_write('create_workflow', function(tx, take)
  local key = workflow_key(tx.base)
  if redis.call('EXISTS', key) == 1 then
    return nil, {'EXISTS'}
  end
  redis.call('HSET', key, 'labels', take(), 'branch', take(), 'standbys', take(),
    'create', tx.now, 'update', tx.now, 'revision', '1')
  return redis.call('HGETALL', key)
end)

register_write('update_workflow', function(tx, take)
  local key, revision, fields = workflow_key(tx.base), take(), take_list(take)
  if not workflow_is_live(tx.base) then
    return nil, {'NO_WORKFLOW'}
  end
  local current = redis.call('HGET', key, 'revision')
  if revision ~= '' and revision ~= current then
    return nil, {'ETAG', current}
  end
  set_fields(key, fields)
  redis.call('HSET', key, 'update', tx.now)
  redis.call('HINCRBY', key, 'revision', 1)
  return redis.call('HGETALL', key)
end)

register_write('delete_workflow', function(tx, take)
  local key = workflow_key(tx.base)
  if not workflow_is_live(tx.base) then
    return nil, {'NO_WORKFLOW'}
  end
  local live = redis.call('ZRANGE', tx.base .. ':live', 0, 0)
  if #live > 0 then
    return nil, {'HAS_SESSIONS', live[1]}
  end
  redis.call('HSET', key, 'delete', tx.now, 'update', tx.now)
  redis.call('HINCRBY', key, 'revision', 1)
  return {}
end)
