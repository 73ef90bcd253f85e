-- Reads of a log across its ancestors. What lies below a head never changes, so that only the row must be read in one
-- step with the list of branches; records that do not fit an answer are fetched later by their branches.

-- {branch, begin, cut} of the branches whose tokens make up [lowest, head), the oldest first.
local function ancestry(base, branch, head, lowest)
  local up, cut = {}, head
  while branch ~= '' do
    local row = redis.call('HGET', base .. ':branches', branch)
    local parent, begin = string.match(row or '', '^(%d*) (%d+)')
    if not begin then
      break
    end
    up[#up + 1] = {branch, tonumber(begin), cut}
    if tonumber(begin) <= lowest then
      break
    end
    branch, cut = parent, math.min(cut, tonumber(begin))
  end
  local parts = {}
  for i = #up, 1, -1 do
    parts[#parts + 1] = up[i]
  end
  return parts
end

-- Start of the record of a branch that holds `position` or comes before it.
local function record_before(base, branch, position)
  local found = redis.call('XREVRANGE', log_key(base, branch), whole(position) .. '-1', '-', 'COUNT', 1)
  return found[1] and tonumber(string.match(found[1][1], '^%d+'))
end

-- Start of the record that covers `position`, or nil.
local function covering(base, parts, position)
  for _, part in ipairs(parts) do
    if part[2] <= position and position < part[3] then
      return record_before(base, part[1], position)
    end
  end
  return nil
end

-- Up to `room` records of a branch with starts in [from, to), each as its start, a space, its length, a line's end and
-- its bytes, in one string: a reply of thousands of small values costs its reader more than all else. Then how many.
local function frames(base, branch, from, to, room)
  local entries = redis.call('XRANGE', log_key(base, branch), whole(from) .. '-0', whole(to) .. '-0', 'COUNT', room)
  local parts = {}
  for i, entry in ipairs(entries) do
    local data = entry[2][2]
    parts[i] = string.match(entry[1], '^%d+') .. ' ' .. #data .. '\n' .. data
  end
  return table.concat(parts), #entries
end

register_read('read_records', function(base, take)
  local branch, from, to, room = take(), tonumber(take()), tonumber(take()), tonumber(take())
  local data, count = frames(base, branch, from, to, room)
  return {data, whole(count)}
end)

-- Adds up to `room` records of [first, stop) to `records`, {branch, cut, frames}; true when that were all.
local function collect(base, parts, first, stop, room, records)
  for _, part in ipairs(parts) do
    local branch, begin, cut = part[1], part[2], part[3]
    if cut > first and begin < stop then
      if room == 0 then
        return false
      end
      local from = record_before(base, branch, first) or begin
      local data, count = frames(base, branch, from, math.min(stop, cut), room)
      records[#records + 1] = {branch, whole(cut), data}
      if count == room then
        return false
      end
      room = room - count
    end
  end
  return true
end

-- Arguments: session, '1' for a deleted one too, start, limit, look-back, records at most, tile. Replies: {'OK', row,
-- parts, covering, records, whether that were all, whether the log goes on behind the head}, or why not. Limit 0: the
-- row alone.
register_read('read_log', function(base, take)
  local session, deleted, start, limit = take(), take(), tonumber(take()), tonumber(take())
  local look_back, room, tile = tonumber(take()), tonumber(take()), tonumber(take())
  local row = redis.call('HMGET', session_key(base, session), 'branch', 'head', 'chain', 'epoch', 'state')
  if not row[5] or (row[5] == 'DELETED' and deleted ~= '1') then
    return {row[5] and 'DELETED' or 'MISSING', session}
  end
  local branch, head = row[1], tonumber(row[2])
  local stop = math.min(head, start + limit)
  if stop <= start then
    return {'OK', row, {}, '', {}, '1', '0'}
  end
  local parts, records = ancestry(base, branch, head, start - look_back), {}
  local first, all = covering(base, parts, start), true
  if first then
    all = collect(base, parts, first - first % tile, stop, room, records)
  end
  local last = record_before(base, branch, 2 ^ 53)
  for i, part in ipairs(parts) do
    parts[i] = {part[1], whole(part[2]), whole(part[3])}
  end
  return {'OK', row, parts, first and whole(first) or '', records, all and '1' or '0',
    stop == head and last and last >= head and '1' or '0'}
end)

register_read('open_generation', function(base, take)
  local session = take()
  local row, refusal = live(base, session, 'generation')
  if not row then
    return refusal
  end
  return {'OK', row[1], row[1] == '' and {} or redis.call('HGETALL', generation_key(base, session, row[1]))}
end)

register_read('get_generation', function(base, take)
  local session, generation = take(), take()
  local row, refusal = live(base, session)
  if not row then
    return refusal
  end
  return {'OK', generation, redis.call('HGETALL', generation_key(base, session, generation))}
end)

register_read('list_generations', function(base, take)
  local session = take()
  local row, refusal = live(base, session, 'branch')
  if not row then
    return refusal
  end
  local found = {}
  for i, generation in ipairs(redis.call('ZRANGE', base .. ':generations:' .. row[1], 0, -1)) do
    found[i] = {generation, redis.call('HGETALL', generation_key(base, session, generation))}
  end
  return {'OK', found}
end)
