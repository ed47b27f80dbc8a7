-- ARGV: maximum number of jobs, caller. Returns those it may see, newest first.
forget_expired()
local jobs = {}
local queue = ARGV[2] == EVERYBODY and JOBS or key('jobs_of', ARGV[2])
for _, id in ipairs(redis.call('ZREVRANGE', queue, 0, ARGV[1] - 1)) do
  jobs[#jobs + 1] = snapshot(id)
end
return jobs
