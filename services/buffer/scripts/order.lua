-- ARGV: owner, what, values…
-- `replicas`: field, value, … of the hash of orders. `paused`, `standby`, `left`: all samplers to which it applies.
-- `checkpoint_wanted`: a mark.
local refusal = no_run()
if refusal then return refusal end
local WHAT = ARGV[2]
if redis.call('GET', key('controller')) ~= ARGV[1] then
  return refuse('FencedError', 'has another controller now, or none')
end
if WHAT == 'replicas' then
  redis.call('HSET', key('orders'), unpack(ARGV, 3))
else
  redis.call('DEL', key(WHAT))
  if #ARGV > 2 then redis.call('SADD', key(WHAT), unpack(ARGV, 3)) end
end
return 1
