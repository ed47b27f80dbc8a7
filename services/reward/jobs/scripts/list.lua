-- ARGV: maximum number of jobs. Returns them, newest first.
forget_expired()
local jobs = {}
for _, id in ipairs(redis.call('ZREVRANGE', JOBS, 0, ARGV[1] - 1)) do
  jobs[#jobs + 1] = snapshot(id)
end
return jobs
