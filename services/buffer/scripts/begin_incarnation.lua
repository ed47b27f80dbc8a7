-- ARGV: a number that the new incarnation exceeds, number of the last acknowledged change, number of this change
local refusal = no_run()
if refusal then return refusal end
redis.call('DEL', key('answer', 'scored'))
outdate_samplers() -- they carry the weights of the incarnation before
-- Redis may have lost the last incarnations, but records and checkpoints name them.
local incarnation = math.max(number_of(META, 'incarnation', 0), tonumber(ARGV[1])) + 1
redis.call('HSET', META, 'incarnation', string.format('%.0f', incarnation), 'trainer_sequence', ARGV[3])
return incarnation
