-- ARGV: incarnation, reason, then group ids
local refusal = fenced(ARGV[1])
if refusal then return refusal end
for i = 3, #ARGV do
  local state = redis.call('HGET', STATES, ARGV[i])
  if state ~= 'scored_claimed' and not marked('dropped:' .. ARGV[2], ARGV[i]) then
    local text = 'group ' .. ARGV[i] .. ' is ' .. (state or 'unknown')
    return refuse('LedgerError', text .. ', not claimed: it cannot be dropped')
  end
end
for i = 3, #ARGV do
  if redis.call('HEXISTS', STATES, ARGV[i]) == 1 then drop(ARGV[i], ARGV[2]) end
end
return 1
