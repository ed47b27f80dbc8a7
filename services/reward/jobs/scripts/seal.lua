-- ARGV: job id, number of chunks
local id, num_chunks = ARGV[1], tonumber(ARGV[2])
local job = figures_of(id)
if not job then return unknown(id) end
if job.state == 'CANCELLED' then return refuse('JobError', 'job ' .. id .. ' is CANCELLED') end
if num_chunks ~= job.num_chunks then
  local text = 'job ' .. id .. ' has ' .. job.num_chunks .. ' chunks, the seal says ' .. num_chunks
  return refuse('DataError', text .. '; go on with next_chunk of the last reply')
end
if job.state == 'OPEN' then
  redis.call('HSET', key('job', id), 'state', 'RUNNING')
  if job.open_chunks == 0 then finish(id, 'DONE') end
end
return snapshot(id)
