-- ARGV: why (target|dataset)
local refusal = no_run()
if refusal then return refusal end
if ARGV[1] == 'target' and limiter.wanted() > 0 then return 0 end
if redis.call('HGET', META, 'feed_done') ~= ARGV[1] then redis.call('HSET', META, 'feed_done', ARGV[1]) end
return 1
