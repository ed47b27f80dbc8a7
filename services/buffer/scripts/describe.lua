-- ARGV: group id. Returns its state ('' if it is over), its score in the queue, how it ended ('' if it did not, or was
-- never admitted), whether it was admitted (1|0), and the fields and values of its hash.
local id = ARGV[1]
local state = redis.call('HGET', STATES, id)
local score = state and redis.call('ZSCORE', key(state), id)
local ended = not state and fate(id)
local admitted = marked('admitted', id) and 1 or 0
return { state or '', score or '', ended or '', admitted, redis.call('HGETALL', key('group', id)) }
