-- ARGV: name, address
redis.call('HSET', key('services'), ARGV[1], ARGV[2])
redis.call('HSET', key('beats'), ARGV[1], NOW_MS)
return 1
