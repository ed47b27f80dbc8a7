-- ARGV: name, generation ('' for a service), figures as JSON
if replaced(ARGV[1], ARGV[2]) then return 0 end
redis.call('HSET', key('beats'), ARGV[1], NOW_MS)
redis.call('HSET', key('figures'), ARGV[1], ARGV[3])
return 1
