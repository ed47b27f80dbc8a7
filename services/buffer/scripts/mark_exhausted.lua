-- ARGV: why (target|dataset)
local refusal = no_run()
if refusal then return refusal end
if ARGV[1] == 'target' and limiter.wanted() > 0 then return 0 end
redis.call('HSET', META, 'feed_done', ARGV[1])
return 1
