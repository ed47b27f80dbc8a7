-- ARGV: incarnation, version
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local published = number_of(META, 'published_version', -1)
if tonumber(ARGV[2]) > published then
  local text = 'version ' .. ARGV[2] .. ' cannot be committed before it is published'
  return refuse('LedgerError', text .. ' (' .. published .. ' is)')
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('trained'), '-inf', ARGV[2])) do commit_group(id) end
return 1
