-- ARGV: incarnation, version, then group ids
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local version = tonumber(ARGV[2])
local fresh = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local state = redis.call('HGET', STATES, id)
  if state == 'scored_claimed' then
    fresh[#fresh + 1] = id
  elseif state ~= 'trained' or tonumber(redis.call('ZSCORE', key('trained'), id)) ~= version then
    local text = 'group ' .. id .. ' is ' .. (state or 'unknown') .. ', not claimed'
    return refuse('LedgerError', text .. ': version ' .. version .. ' cannot train it')
  end
end
if #fresh > 0 and version <= number_of(META, 'published_version', -1) then
  return refuse('LedgerError', 'version ' .. version .. ' was published before group ' .. fresh[1] .. ' was recorded')
end
if #fresh > 0 and version <= number_of(META, 'recorded_version', -1) then
  return refuse('LedgerError', 'version ' .. version .. ' was recorded before, without group ' .. fresh[1])
end
for _, id in ipairs(fresh) do
  leave(id)
  redis.call('DEL', key('payload', id))
  redis.call('HDEL', key('group', id), 'headers')
  enter(id, 'trained', version)
end
if #fresh > 0 then redis.call('HSET', META, 'recorded_version', version) end
return 1
