-- ARGV: checkpoint version, the recorded version before, a recorded version, its group ids
-- Refuses a record that contradicts what Redis knows as trained.
local version, recorded = tonumber(ARGV[3]), {}
for i = 4, #ARGV do
  local id = ARGV[i]
  recorded[id] = true
  local known = redis.call('ZSCORE', key('trained'), id)
  if known and tonumber(known) ~= version then
    local text = 'group ' .. id .. ' is recorded in version ' .. ARGV[3]
    return refuse('LedgerError', text .. ', but Redis knows it as trained in version ' .. known)
  end
end
local above = math.max(tonumber(ARGV[1]), tonumber(ARGV[2]))
local ids, known = next_trained('(' .. above, ARGV[3])
for _, id in ipairs(ids) do
  if not recorded[id] then
    local text = 'version ' .. known .. ' trained group ' .. id
    return refuse('LedgerError', text .. ', but no record of that version holds it; is its batch folder missing?')
  end
end
return 1
