-- ARGV: incarnation, version, then id and generation ('' is not checked) of each sampler that acknowledged it
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local published = number_of(META, 'published_version', -1)
if tonumber(ARGV[2]) < published then
  return refuse('LedgerError', 'version ' .. ARGV[2] .. ' cannot be published after version ' .. published)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('trained'), '-inf', ARGV[2])) do limiter.retire(id) end
redis.call('HSET', META, 'published_version', ARGV[2])
for i = 3, #ARGV, 2 do
  -- A sampler that restarted after its acknowledgement has its first weights again, so it stays JOINING.
  if redis.call('EXISTS', sampler_key(ARGV[i])) == 1 and not replaced(ARGV[i], ARGV[i + 1]) then
    admit_sampler(ARGV[i], ARGV[2], ARGV[1])
  end
end
outdate_samplers(ARGV[2], ARGV[1])
return 1
