-- Returns one line for each violation. All counters are compared at one instant.
local violations = {}
local function expect(holds_true, text)
  if not holds_true then violations[#violations + 1] = text end
end
local function figure(name)
  return number_of(COUNTERS, name, 0)
end

local num_queued = 0
for _, queue in ipairs({ 'trained', unpack(LIVE) }) do
  num_queued = num_queued + redis.call('ZCARD', key(queue))
end
local num_states = redis.call('HLEN', STATES)
expect(num_queued == num_states, num_queued .. ' groups stand in queues, ' .. num_states .. ' have a state')
local committed = number_of(META, 'committed_version', 0)
local behind = next_trained('-inf', committed)[1]
local text = 'version ' .. committed .. ' is committed, and group '
expect(not behind, text .. (behind or '') .. ' of it or before is not')

local dropped, counters = 0, redis.call('HGETALL', COUNTERS)
for i = 1, #counters, 2 do
  if string.sub(counters[i], 1, 8) == 'dropped:' then dropped = dropped + counters[i + 1] end
end
expect(dropped == figure('dropped'), 'dropped counts ' .. figure('dropped') .. ', the reasons add up to ' .. dropped)

local sum = num_queued + figure('committed') + figure('dropped')
expect(figure('admitted') == sum, 'admitted are ' .. figure('admitted') .. ', the states add up to ' .. sum)
local outstanding = redis.call('SCARD', OUTSTANDING)
local owed = figure('admitted') - figure('retired') + figure('restored')
expect(outstanding == owed, 'outstanding are ' .. outstanding .. ', admitted - retired + restored is ' .. owed)
return violations
