-- Forks and rewinds: new branches that share their past.

-- The branch that owns the last token before `position`: branches that add nothing are left out, so that chains of
-- forks stay short. '' at 0: nothing is shared.
local function branch_below(base, branch, position)
  if position == 0 then
    return ''
  end
  while branch ~= '' do
    local row = redis.call('HGET', base .. ':branches', branch)
    local parent, begin = string.match(row or '', '^(%d*) (%d+)')
    if not begin or tonumber(begin) < position then
      return branch
    end
    branch = parent
  end
  return ''
end

-- Where the new branches begin, or nil and why not. `position` '' is the head; `known` is the branch that the caller
-- computed its chain on, which is used anywhere but at the head.
local function birth_at(base, position, known, branch, head, chain)
  if position == '' or position == head then
    return {head = head, chain = chain, branch = branch_below(base, branch, tonumber(head))}
  end
  if tonumber(position) > tonumber(head) then
    return nil, {'BEYOND', position, head}
  end
  if known.branch ~= branch then
    return nil, {'MOVED', branch, head, chain}
  end
  local below = branch_below(base, branch, tonumber(position))
  return {head = position, chain = known.chain, branch = below}
end

-- The children of a call, {id, fields} each, or nil and which name is there twice.
local function take_children(take)
  local children, seen = {}, {}
  for i = 1, tonumber(take()) do
    local session = take()
    children[i] = {session, take_list(take)}
    if seen[session] then
      return nil, {'EXISTS', session}
    end
    seen[session] = true
  end
  return children
end

register_write('fork', function(tx, take)
  local base, parent, position = tx.base, take(), take()
  local known = {branch = take(), chain = take()}
  local children, refusal = take_children(take)
  if not children then
    return nil, refusal
  end
  local row
  row, refusal = live(base, parent, 'branch', 'head', 'chain', 'exact', 'numerics')
  if not row then
    return nil, refusal
  end
  local birth
  birth, refusal = birth_at(base, position, known, unpack(row, 1, 3))
  if not birth then
    return nil, refusal
  end
  for _, child in ipairs(children) do
    refusal = check_new(base, child[1])
    if refusal then
      return nil, refusal
    end
  end
  local made = {}
  for i, child in ipairs(children) do
    local fields = child[2]
    for _, value in ipairs({'parent', parent, 'exact', row[4], 'numerics', row[5]}) do
      table.insert(fields, value)
    end
    made[i] = insert(tx, child[1], birth, fields)
  end
  return {birth.head, made}
end)

register_write('rewind', function(tx, take)
  local base, session, epoch, position = tx.base, take(), take(), take()
  local known = {branch = take(), chain = take()}
  local row, refusal = held(base, session, epoch, 'generation', 'branch', 'head', 'chain', 'rewound', 'fork')
  if not row then
    return nil, refusal
  end
  local branch, head, rewound, fork = row[3], row[4], row[6], row[7]
  if row[2] ~= '' then
    return nil, {'BUSY', row[2], head}
  end
  local birth
  birth, refusal = birth_at(base, position, known, unpack(row, 3, 5))
  if not birth then
    return nil, refusal
  end
  local left = redis.call('HGET', base .. ':branches', branch)
  local new = add_branch(base, birth.branch, birth.head)
  if left then
    redis.call('HSET', base .. ':branches', branch, left .. ' ' .. head)
  end
  end_migration(base, session)
  return change(tx, session, {'branch', new, 'head', birth.head, 'chain', birth.chain,
    'rewound', whole(math.max(tonumber(rewound), tonumber(head))),
    'fork', whole(math.min(tonumber(fork), tonumber(birth.head)))})
end)
