-- ARGV: stage, then id, token, payload, headers of each group. Returns the tokens of leases that are no longer current.
local stage = ARGV[1]
sweep(stage)
local refused = {}
local checked = false
for i = 2, #ARGV, 4 do
  local id, token = ARGV[i], ARGV[i + 1]
  local group = key('group', id)
  if holds(id, stage, token) then
    if not checked then refuse_when_full() end -- before the first, so that all of a call or none are completed
    checked = true
    leave(id)
    redis.call('HDEL', group, 'token', 'worker')
    redis.call('HSET', group, 'completed:' .. stage, token)
    redis.call('SET', key('payload', id), ARGV[i + 2])
    redis.call('DEL', key('partial', id))
    if stage == 'prompts' then
      enter(id, 'generated_waiting', 'back')
    else
      redis.call('HSET', group, 'headers', ARGV[i + 3])
      if redis.call('HDEL', META, 'consecutive_drops') == 1 then set_suspects_aside() end
      enter(id, 'scored_waiting', redis.call('HINCRBY', META, 'sequence', 1))
    end
  elseif redis.call('HGET', group, 'completed:' .. stage) ~= token then
    count('stale_results_refused')
    refused[#refused + 1] = token
  end
end
if checked then signal(stage == 'prompts' and 'generated' or 'scored') end
return refused
