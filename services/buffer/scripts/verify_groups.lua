-- ARGV: group ids. Returns one line for each violation. All that concerns a group is compared at one instant.
local violations = {}
local published = number_of(META, 'published_version', -1)

local function check(id)
  local state = redis.call('HGET', STATES, id)
  local function expect(holds_true, text)
    if not holds_true then violations[#violations + 1] = 'group ' .. id .. ' (' .. (state or 'over') .. ') ' .. text end
  end
  local queues = {}
  for _, queue in ipairs({ 'trained', unpack(LIVE) }) do
    if redis.call('ZSCORE', key(queue), id) then queues[#queues + 1] = queue end
  end
  local place = #queues > 0 and table.concat(queues, ' and in ') or 'no queue'
  expect(place == (state or 'no queue'), 'stands in ' .. place)

  local leased = state == 'prompts_leased' or state == 'generated_leased'
  local scored = state == 'scored_waiting' or state == 'scored_claimed'
  local trained = state == 'trained'
  local version = tonumber(redis.call('ZSCORE', key('trained'), id) or published + 1)
  local owes = state and (not trained or version > published)
  local has_payload = redis.call('EXISTS', key('payload', id)) == 1
  local group = redis.call('HMGET', key('group', id), 'token', 'worker', 'headers')
  local token, worker, headers = group[1], group[2], group[3]
  expect(has_payload == (state and not trained), has_payload and 'still has its payload in Redis' or 'has no payload')
  expect(leased == (token ~= false), leased and 'has no token' or 'has a token')
  expect(not leased or redis.call('ZSCORE', key('leases', worker or ''), id), 'is not among the leases of its worker')
  expect(not scored or headers, 'has no headers')
  local in_debt = redis.call('SISMEMBER', OUTSTANDING, id) == 1
  expect(in_debt == owes, owes and 'is not outstanding' or 'is still outstanding')
  local ended = fate(id)
  expect(not state or marked('admitted', id), 'was never admitted')
  expect(not state or not ended, 'is also ' .. (ended or ''))
end

for _, id in ipairs(ARGV) do check(id) end
return violations
