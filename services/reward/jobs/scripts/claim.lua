-- ARGV: request, worker, lease in ms.
-- Returns the next chunk (job id, index, token, first item, attempts, losses, in progress, rubric, digest, items,
-- partial results), or nothing if none waits.
forget_expired()
sweep_leases()
local id, index, token
local answer = remembered(ARGV[1])
if answer then
  id, index, token = string.match(answer, '^(%x+):(%d+) (%d+)$')
else
  local name = redis.call('ZRANGE', WAITING, 0, 0)[1]
  if not name then
    signal()
    return {}
  end
  id, index = string.match(name, '^(%x+):(%d+)$')
  token = next_tokens(1)[1]
  local chunk, priority = chunk_of(id, index), redis.call('HGET', key('job', id), 'priority')
  local served = 'served:' .. priority
  local start = chunk.place + priority * PLACES_A_PRIORITY
  redis.call('HSET', META, served, string.format('%.0f', math.max(start, number_of(META, served, 0))))
  redis.call('ZREM', WAITING, name)
  redis.call('ZADD', LEASED, NOW_MS + ARGV[3], name)
  chunk.worker, chunk.token = ARGV[2], token
  keep(id, index, chunk)
  remember(ARGV[1], name .. ' ' .. token)
  signal()
end

local chunk = chunk_of(id, index)
if not holds(chunk, token) then return {} end
return {
  id, index, token, chunk.first, chunk.attempts, chunk.losses, chunk.under_way, redis.call('GET', key('rubric', id)),
  redis.call('HGET', key('job', id), 'digest'), redis.call('HGET', key('items', id), index),
  redis.call('HGET', key('partials', id), index),
}
