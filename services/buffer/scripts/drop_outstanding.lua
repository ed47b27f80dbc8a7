-- ARGV: incarnation, request, reason
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local answer = remembered(ARGV[2])
if answer then return tonumber(answer) end
local dropped, states = 0, redis.call('HGETALL', STATES)
for i = 1, #states, 2 do
  if states[i + 1] ~= 'trained' then
    drop(states[i], ARGV[3])
    dropped = dropped + 1
  end
end
for _, stage in ipairs({ 'prompts', 'generated', 'scored' }) do signal(stage) end
remember(ARGV[2], dropped)
return dropped
