-- ARGV: job id, index, token, partial results, how many units are under way (0: all without a result), whether what holders died of is
-- behind (1: losses count from 0 again). Answers whether the lease is current.
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
