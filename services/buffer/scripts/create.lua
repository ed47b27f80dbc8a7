-- ARGV: request, resume (0|1), groups_per_batch, staleness_budget, target_groups, infrastructure budget, data budget
local creator = redis.call('HGET', META, 'created_by')
if creator and creator ~= ARGV[1] and ARGV[2] == '0' then return refuse('RunExistsError', 'exists already') end
local refusal = creator and other_schema()
if refusal then return refusal end
if not creator then
  redis.call('HSET', META, 'schema', SCHEMA, 'created_by', ARGV[1], 'incarnation', 0, 'cursor', 0)
  redis.call('HSET', META, 'published_version', -1, 'recorded_version', -1, 'committed_version', 0)
end
redis.call('HSET', META, 'groups_per_batch', ARGV[3], 'staleness_budget', ARGV[4], 'target_groups', ARGV[5])
redis.call('HSET', META, 'failure_budget:infrastructure', ARGV[6], 'failure_budget:data', ARGV[7])
-- The target may have grown, so the feed reports again when it is done.
redis.call('HDEL', META, 'feed_done', 'consecutive_drops', 'ended')
redis.call('DEL', key('suspected'))
return 1
