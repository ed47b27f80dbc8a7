-- ARGV: job id, caller. Removes its chunks without a result from the queues, leased ones too: a later result is
-- refused.
local id = ARGV[1]
local job = figures_for(ARGV[2], id)
if not job then return unknown(id) end
if job.state == 'OPEN' or job.state == 'RUNNING' then
  for _, index in ipairs(redis.call('HKEYS', key('chunks', id))) do
    redis.call('ZREM', WAITING, chunk_name(id, index))
    redis.call('ZREM', LEASED, chunk_name(id, index))
  end
  local waiting = num_waiting(job)
  if waiting > 0 then redis.call('HSET', key('job', id), 'unscored:cancelled', waiting) end
  redis.call('HSET', key('job', id), 'open_chunks', 0, 'unscored_bytes', 0)
  count('unscored_bytes', 0 - job.unscored_bytes) -- Redis reads no -0
  count('items_ended', waiting)
  finish(id, 'CANCELLED')
end
return snapshot(id)
