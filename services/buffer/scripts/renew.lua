-- ARGV: lease in ms, then group id, stage, token, saves a partial result (0|1), partial of each.
-- Returns the tokens of leases that are lost.
sweep('prompts')
sweep('generated')
local lost = {}
for i = 2, #ARGV, 5 do
  local id, stage = ARGV[i], ARGV[i + 1]
  if holds(id, stage, ARGV[i + 2]) then
    refuse_when_full()
    redis.call('ZADD', key(stage .. '_leased'), NOW_MS + ARGV[1], id)
    if ARGV[i + 3] == '1' then redis.call('SET', key('partial', id), ARGV[i + 4]) end
  else
    lost[#lost + 1] = ARGV[i + 2]
  end
end
return lost
