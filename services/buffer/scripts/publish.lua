-- ARGV: incarnation, version, number of the groups that it trained, their ids, then id and generation ('' is not
-- checked) of each sampler that acknowledged it
-- Publishes the next trained version, and answers 0 while it is below `version`. Several are left only after a
-- rollback, when no sampler is LIVE. A trainer may die between two calls: the next rollback restores their groups.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local published = number_of(META, 'published_version', -1)
if tonumber(ARGV[2]) < published then
  return refuse('LedgerError', 'version ' .. ARGV[2] .. ' cannot be published after version ' .. published)
end
local first_sampler = 4 + ARGV[3]
for i = 4, first_sampler - 1 do
  if tonumber(redis.call('ZSCORE', key('trained'), ARGV[i]) or -1) ~= tonumber(ARGV[2]) then
    local text = 'version ' .. ARGV[2] .. ' cannot be published: group ' .. ARGV[i] .. ' is '
    return refuse('LedgerError', text .. (redis.call('HGET', STATES, ARGV[i]) or 'unknown') .. ', not trained in it')
  end
end
local ids, version = next_trained('(' .. published, ARGV[2])
for _, id in ipairs(ids) do limiter.retire(id) end
if version and version < tonumber(ARGV[2]) then
  redis.call('HSET', META, 'published_version', version)
  return 0
end
redis.call('HSET', META, 'published_version', ARGV[2])
local admitted = {}
for i = first_sampler, #ARGV, 2 do
  -- A sampler that restarted after its acknowledgement has its first weights again, so it stays JOINING.
  local generation = redis.call('HGET', key('generations'), ARGV[i])
  if generation and (ARGV[i + 1] == '' or ARGV[i + 1] == generation) then
    admit_sampler(ARGV[i], ARGV[2], ARGV[1])
    admitted[ARGV[i]] = true
  end
end
outdate_samplers(ARGV[2], ARGV[1], admitted)
return 1
