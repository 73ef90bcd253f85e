-- Migrations: an owner's word that its session may go to another node, and the cut-over that takes it at its word.

local function row_of(base, session)
  return {session, redis.call('HGETALL', session_key(base, session))}
end

register_write('begin_migration', function(tx, take)
  local session, epoch, migration, target = take(), take(), take(), take()
  local row, refusal = held(tx.base, session, epoch, 'migration', 'target')
  if not row then
    return nil, refusal
  end
  if row[2] == '' then
    return change(tx, session, {'migration', migration, 'target', target})
  end
  if row[2] ~= migration or row[3] ~= target then
    return nil, {'UNDER_WAY', row[2], row[3]}
  end
  return row_of(tx.base, session)
end)

register_write('end_migration', function(tx, take)
  local session, epoch, migration = take(), take(), take()
  local row, refusal = owned(tx.base, session, epoch, 'migration')
  if not row then
    return nil, refusal
  end
  if row[2] == '' or row[2] ~= migration then
    return row_of(tx.base, session)
  end
  end_migration(tx.base, session)
  return change(tx, session, {})
end)

-- Arguments: session, epoch, migration, new owner, head and hash that it has; then what it knows of the head: branch,
-- head, chain, and that chain's hash.
register_write('cut_over', function(tx, take)
  local session, epoch, migration, owner, head, hash = take(), take(), take(), take(), take(), take()
  local known = {branch = take(), head = take(), chain = take()}
  local known_hash = take()
  local row, refusal = held(tx.base, session, epoch, 'migration', 'target', 'branch', 'head', 'chain')
  if not row then
    return nil, refusal
  end
  if row[2] == '' or row[2] ~= migration or row[3] ~= owner then
    return nil, {'MIGRATION_ENDED', migration}
  end
  if not knows(known, row[4], row[5], row[6]) then
    return nil, {'MOVED', row[4], row[5], row[6]}
  end
  if unexpected(row[5], known_hash, head, hash) then
    return nil, {'UNEXPECTED', row[5]}
  end
  redis.call('HINCRBY', session_key(tx.base, session), 'epoch', 1)
  end_migration(tx.base, session)
  return change(tx, session, {'owner', owner, 'takeovers', '0'})
end)
