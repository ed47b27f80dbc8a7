-- Returns one line for each violation. It is a single script, so that it sees one consistent state.
local violations = {}
local function expect(holds_true, text)
  if not holds_true then violations[#violations + 1] = text end
end
local function figure(name)
  return number_of(COUNTERS, name, 0)
end
local function present(name, id)
  return redis.call('EXISTS', key(name, id)) == 1
end

-- Every queue contains each of its groups once, and the group's state names that queue.
local num_queued = 0
local queue_of = {}
for _, queue in ipairs({ 'trained', unpack(LIVE) }) do
  local ids = redis.call('ZRANGE', key(queue), 0, -1)
  num_queued = num_queued + #ids
  for _, id in ipairs(ids) do
    expect(not queue_of[id], 'group ' .. id .. ' stands in ' .. queue .. ' and in ' .. (queue_of[id] or ''))
    queue_of[id] = queue
  end
end

local published = number_of(META, 'published_version', -1)
local states = redis.call('HGETALL', STATES)
for i = 1, #states, 2 do
  local id, state = states[i], states[i + 1]
  local name = 'group ' .. id .. ' (' .. state .. ') '
  local leased = state == 'prompts_leased' or state == 'generated_leased'
  local trained = state == 'trained'
  local scored = state == 'scored_waiting' or state == 'scored_claimed'
  local version = trained and tonumber(redis.call('ZSCORE', key('trained'), id) or published + 1)
  local in_debt = redis.call('SISMEMBER', OUTSTANDING, id) == 1
  local has_token = redis.call('HEXISTS', key('group', id), 'token') == 1
  expect(queue_of[id] == state, name .. 'stands in ' .. (queue_of[id] or 'no queue'))
  expect(present('payload', id) ~= trained, name .. (trained and 'still has its payload in Redis' or 'has no payload'))
  expect(has_token == leased, name .. (leased and 'has no token' or 'has a token'))
  expect(not scored or redis.call('HEXISTS', key('group', id), 'headers') == 1, name .. 'has no headers')
  local owes = not trained or version > published
  expect(in_debt == owes, name .. (owes and 'is not outstanding' or 'is still outstanding'))
  expect(marked('admitted', id), name .. 'was never admitted')
  local ended = fate(id)
  expect(not ended, name .. 'is also ' .. (ended or ''))
end
expect(num_queued == #states / 2, num_queued .. ' groups stand in queues, ' .. #states / 2 .. ' have a state')

-- The counters agree with the bit of every group, and with one another.
local bits = { admitted = 0, committed = 0 }
for _, epoch in ipairs(redis.call('SMEMBERS', key('epochs'))) do
  for _, map in ipairs(redis.call('SMEMBERS', key('maps', epoch))) do
    bits[map] = (bits[map] or 0) + redis.call('BITCOUNT', bits_key(map, epoch))
  end
end
local dropped = 0
for map, number in pairs(bits) do
  expect(number == figure(map), map .. ' counts ' .. figure(map) .. ', marked are ' .. number)
  if map ~= 'admitted' and map ~= 'committed' then dropped = dropped + number end
end
expect(dropped == figure('dropped'), 'dropped counts ' .. figure('dropped') .. ', the reasons add up to ' .. dropped)

local sum = num_queued + figure('committed') + figure('dropped')
expect(figure('admitted') == sum, 'admitted are ' .. figure('admitted') .. ', the states add up to ' .. sum)
local outstanding = redis.call('SCARD', OUTSTANDING)
local owed = figure('admitted') - figure('retired') + figure('restored')
expect(outstanding == owed, 'outstanding are ' .. outstanding .. ', admitted - retired + restored is ' .. owed)
return violations
