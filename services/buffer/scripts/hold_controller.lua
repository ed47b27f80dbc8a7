-- ARGV: owner, lease in ms (0: gives it back). Returns 0 while another controller holds the run.
local CONTROLLER = key('controller')
local holder = redis.call('GET', CONTROLLER)
if holder and holder ~= ARGV[1] then return 0 end
if tonumber(ARGV[2]) > 0 then
  redis.call('SET', CONTROLLER, ARGV[1], 'PX', ARGV[2])
elseif holder then
  redis.call('DEL', CONTROLLER)
end
return 1
