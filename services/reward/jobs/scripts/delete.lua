-- ARGV: job id, caller. Deletes a job that has ended, with its results and its key. Returns the job as it was, also
-- to a caller that repeats the request within a minute.
local id, caller = ARGV[1], ARGV[2]
local answer = remembered('delete:' .. caller .. ':' .. id)
if answer then return cjson.decode(answer) end
local job = figures_for(caller, id)
if not job then return unknown(id) end
if job.state == 'OPEN' or job.state == 'RUNNING' then
  return refuse('JobError', 'job ' .. id .. ' is ' .. job.state .. '; cancel it first, then delete it')
end
local was = snapshot(id)
forget(id)
remember('delete:' .. caller .. ':' .. id, cjson.encode(was))
return was
