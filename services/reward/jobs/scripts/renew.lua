-- ARGV: lease in ms, then job id, index, token of each chunk. Returns the tokens of lost leases. A lease that expired
-- while Redis was down, and that nobody took, is not lost.
local lost = {}
for i = 2, #ARGV, 3 do
  local chunk = chunk_of(ARGV[i], ARGV[i + 1])
  if holds(chunk, ARGV[i + 2]) then
    redis.call('ZADD', LEASED, NOW_MS + ARGV[1], chunk_name(ARGV[i], ARGV[i + 1]))
  else
    forgive(ARGV[i], ARGV[i + 1], chunk, ARGV[i + 2])
    lost[#lost + 1] = ARGV[i + 2]
  end
end
sweep_leases()
return lost
