-- ARGV: job id, cursor, limit in bytes, caller. Returns the job, and the results after the cursor in order: at least
-- one if there is any.
local id, cursor, left = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local job = figures_for(ARGV[4], id)
if not job then return unknown(id) end
if job.state == 'EXPIRED' and cursor < job.num_results and left > 0 then
  local text = 'job ' .. id .. ' is EXPIRED: its results were given up for those of later jobs (jobs.max_result_bytes)'
  return refuse('JobError', text .. '; delete it and submit it again to have them anew')
end
local results = {}
while cursor < job.num_results and left > 0 do
  cursor = cursor + 1
  results[#results + 1] = redis.call('HGET', key('results', id), cursor)
  left = left - #results[#results]
end
return { snapshot(id), results }
