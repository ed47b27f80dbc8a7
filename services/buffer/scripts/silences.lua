-- Returns name and milliseconds since the last heartbeat of every service and sampler.
local reply = {}
local beats = redis.call('HGETALL', key('beats'))
for i = 1, #beats, 2 do
  reply[i] = beats[i]
  reply[i + 1] = math.max(0, NOW_MS - beats[i + 1])
end
return reply
