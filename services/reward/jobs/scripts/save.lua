-- ARGV: job id, index, token, partial results, number of units in progress (0: all without a result), whether to count
-- losses from 0 again (1). Returns whether the lease is current.
local id, index = ARGV[1], ARGV[2]
local chunk = chunk_of(id, index)
if not holds(chunk, ARGV[3]) then
  forgive(id, index, chunk, ARGV[3])
  return 0
end
refuse_when_full()
chunk.under_way = tonumber(ARGV[5])
if ARGV[6] == '1' then chunk.losses, chunk.lost = 0, {} end
keep(id, index, chunk)
redis.call('HSET', key('partials', id), index, ARGV[4])
return 1
