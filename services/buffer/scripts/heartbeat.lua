-- ARGV: name, generation, figures as JSON, activity
-- Returns what the service is to know: '', `replaced` (by a later start of it), `left` (it is to leave the run), or how
-- the run ended.
local refusal = refuse_unknown(ARGV[1], ARGV[2])
if refusal then return refusal end
if replaced(ARGV[1], ARGV[2]) then return 'replaced' end
redis.call('HSET', key('beats'), ARGV[1], NOW_MS)
redis.call('HSET', key('figures'), ARGV[1], ARGV[3])
redis.call('HSET', key('activities'), ARGV[1], ARGV[4])
if redis.call('SISMEMBER', key('left'), ARGV[1]) == 1 then return 'left' end
return redis.call('HGET', META, 'ended') or ''
