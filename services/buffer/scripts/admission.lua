local refusal = no_run()
if refusal then return refusal end
return { limiter.free(), limiter.wanted(), number_of(META, 'cursor', 0), redis.call('HLEN', key('set_aside')) }
