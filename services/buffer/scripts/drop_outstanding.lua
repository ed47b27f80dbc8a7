-- ARGV: incarnation, request, reason. Drops some groups that are not trained, and returns their number.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local answer = remembered(ARGV[2])
if answer then return tonumber(answer) end
local dropped = 0
for _, state in ipairs(LIVE) do
  local ids = dropped < CHUNK and redis.call('ZRANGE', key(state), 0, CHUNK - dropped - 1) or {}
  for _, id in ipairs(ids) do drop(id, ARGV[3]) end
  dropped = dropped + #ids
end
for _, stage in ipairs({ 'prompts', 'generated', 'scored' }) do signal(stage) end
remember(ARGV[2], dropped)
return dropped
