-- ARGV: name, address. Returns the generation of this start.
redis.call('HSET', key('services'), ARGV[1], ARGV[2])
redis.call('HSET', key('beats'), ARGV[1], NOW_MS)
return next_generation(ARGV[1])
