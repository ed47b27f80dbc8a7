-- ARGV: request, resume (0|1), groups_per_batch, staleness_budget, target_groups, infrastructure budget, data budget
local SCHEMA = '2' -- of the keys; another one means other types under the same names
local creator, schema = unpack(redis.call('HMGET', META, 'created_by', 'schema'))
if creator and creator ~= ARGV[1] and ARGV[2] == '0' then return refuse('RunExistsError', 'exists already') end
if creator and schema ~= SCHEMA then
  local text = 'has a ledger of schema ' .. (schema or '1') .. ', and this version of Tandem reads schema ' .. SCHEMA
  return refuse('ConfigError', text .. '; finish the run with the version that began it, or start a new run')
end
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
