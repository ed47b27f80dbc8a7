-- ARGV: owner, lease in ms (0: gives it back). Returns 0 while another controller holds the run.
local CONTROLLER = key('controller')
local UNTIL = key('controller_until') -- by NOW_MS: the expiry of Redis' keys jumps with the clock of its host
local holder = redis.call('GET', CONTROLLER)
if holder and holder ~= ARGV[1] and tonumber(redis.call('GET', UNTIL) or NOW_MS) >= NOW_MS then return 0 end
if tonumber(ARGV[2]) > 0 then
  redis.call('SET', CONTROLLER, ARGV[1], 'PX', ARGV[2])
  redis.call('SET', UNTIL, NOW_MS + ARGV[2], 'PX', ARGV[2])
elseif holder then
  redis.call('DEL', CONTROLLER, UNTIL)
end
return 1
