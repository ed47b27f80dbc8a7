-- ARGV: job id, bytes of a chunk. Returns whether there is room (0|1), and the job.
local id = ARGV[1]
local job = figures_of(id)
if not job then return unknown(id) end
return { (job.state ~= 'OPEN' or has_room(job, tonumber(ARGV[2]))) and 1 or 0, snapshot(id) }
