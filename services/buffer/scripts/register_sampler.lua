-- ARGV: sampler id, address, tensor_parallel_size. Returns the generation of this start.
redis.call('SADD', key('samplers'), ARGV[1])
redis.call('HSET', sampler_key(ARGV[1]), 'address', ARGV[2], 'tensor_parallel_size', ARGV[3])
redis.call('HSET', sampler_key(ARGV[1]), 'state', 'JOINING', 'version', -1, 'incarnation', -1)
redis.call('HSET', key('beats'), ARGV[1], NOW_MS)
return next_generation(ARGV[1])
