-- ARGV: group id, stage, token, payload, headers
local id, stage, token = ARGV[1], ARGV[2], ARGV[3]
sweep(stage)
local group = key('group', id)
if holds(id, stage, token) then
  refuse_when_full()
  leave(id)
  redis.call('HDEL', group, 'token', 'worker')
  redis.call('HSET', group, 'completed:' .. stage, token)
  redis.call('SET', key('payload', id), ARGV[4])
  redis.call('DEL', key('partial', id))
  if stage == 'prompts' then
    enter(id, 'generated_waiting', 'back')
    signal('generated')
  else
    redis.call('HSET', group, 'headers', ARGV[5])
    redis.call('HDEL', META, 'consecutive_drops')
    enter(id, 'scored_waiting', redis.call('HINCRBY', META, 'sequence', 1))
    signal('scored')
  end
  return 1
end
if redis.call('HGET', group, 'completed:' .. stage) == token then return 1 end
count('stale_results_refused')
return 0
