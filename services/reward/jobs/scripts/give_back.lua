-- ARGV: request, job id, index, token, attempts so far, partial results (empty: none), pause in ms.
-- Returns whether the lease was current.
local answer = remembered(ARGV[1])
if answer then return tonumber(answer) end
sweep_leases()
local id, index = ARGV[2], ARGV[3]
local chunk = chunk_of(id, index)
if not holds(chunk, ARGV[4]) then
  forgive(id, index, chunk, ARGV[4])
  return 0
end
if ARGV[6] ~= '' then refuse_when_full() end
chunk.worker, chunk.token, chunk.attempts, chunk.under_way = '', '', tonumber(ARGV[5]), 0
keep(id, index, chunk)
if ARGV[6] ~= '' then redis.call('HSET', key('partials', id), index, ARGV[6]) end
redis.call('ZADD', LEASED, NOW_MS + ARGV[7], chunk_name(id, index))
sweep_leases() -- no pause: it waits again at once
signal()
return tonumber(remember(ARGV[1], 1))
