local refusal = no_run()
if refusal then return refusal end
redis.call('DEL', key('answer', 'scored'))
outdate_samplers() -- they carry the weights of the incarnation before
return redis.call('HINCRBY', META, 'incarnation', 1)
