-- ARGV: id for a new job, idempotency key, rubric, priority, name, digest of the rubric, owner
forget_expired()
local owner = ARGV[7]
local id = redis.call('HGET', BY_KEY, owner .. ':' .. ARGV[2])
if id then
  local other
  if redis.call('HGET', key('job', id), 'rubric_sha') ~= redis.sha1hex(ARGV[3]) then other = 'rubric' end
  if redis.call('HGET', key('job', id), 'priority') ~= ARGV[4] then other = 'priority' end
  if other then
    local text = 'job ' .. id .. ' has this idempotency_key and another ' .. other
    return refuse('JobExistsError', text .. '; give the one it was submitted with, or choose another key')
  end
  return snapshot(id)
end
refuse_when_full()
local refusal = refuse_beyond_results()
if refusal then return refusal end
id = ARGV[1]
redis.call('HSET', key('job', id), 'idempotency_key', ARGV[2], 'priority', ARGV[4], 'name', ARGV[5], 'digest', ARGV[6])
redis.call('HSET', key('job', id), 'rubric_sha', redis.sha1hex(ARGV[3]), 'owner', owner)
redis.call('HSET', key('job', id), 'state', 'OPEN', 'created_ms', WALL_MS, 'finished_ms', 0, 'expires_ms', 0)
redis.call('HSET', key('job', id), 'num_items', 0, 'num_scored', 0, 'sum_values', 0, 'num_results', 0)
redis.call('HSET', key('job', id), 'num_chunks', 0, 'open_chunks', 0, 'unscored_bytes', 0, 'rank', 0)
redis.call('SET', key('rubric', id), ARGV[3])
hold(id, RECORD_BYTES + #ARGV[3])
redis.call('HSET', BY_KEY, owner .. ':' .. ARGV[2], id)
local number = count('jobs_submitted')
redis.call('ZADD', JOBS, number, id)
redis.call('ZADD', key('jobs_of', owner), number, id)
touch(id)
return snapshot(id)
