-- ARGV: incarnation, checkpoint version, last recorded version. Answers 0 while work is left.
-- Commits the versions in the checkpoint, one a call; then requeues what was claimed and not recorded.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local ids = next_trained('-inf', ARGV[2])
for _, id in ipairs(ids) do
  limiter.retire(id)
  commit_group(id)
end
if #ids > 0 then return 0 end
local claimed = redis.call('ZRANGE', key('scored_claimed'), 0, CHUNK - 1)
for _, id in ipairs(claimed) do
  local _, sequence = leave(id)
  enter(id, 'scored_waiting', sequence)
end
if #claimed == CHUNK then return 0 end
redis.call('DEL', key('answer', 'scored'))
redis.call('HSET', META, 'published_version', ARGV[2], 'committed_version', ARGV[2], 'recorded_version', ARGV[3])
for _, stage in ipairs({ 'prompts', 'generated', 'scored' }) do signal(stage) end
return 1
