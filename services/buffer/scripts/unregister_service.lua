-- ARGV: name, generation
-- A later start of the service keeps its place.
if not replaced(ARGV[1], ARGV[2]) then redis.call('HDEL', key('services'), ARGV[1]) end
return ''
