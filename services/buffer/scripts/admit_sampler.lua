-- ARGV: incarnation, sampler id, generation ('' is not checked), version
local refusal = fenced(ARGV[1])
if refusal then return refusal end
if redis.call('EXISTS', sampler_key(ARGV[2])) == 0 then return 0 end
-- The weights are those of one start: not of a later one, nor of an earlier one, if Redis has lost that start.
if ARGV[3] ~= '' and redis.call('HGET', key('generations'), ARGV[2]) ~= ARGV[3] then return 0 end
if redis.call('HGET', META, 'published_version') ~= ARGV[4] then return 0 end
admit_sampler(ARGV[2], ARGV[4], ARGV[1])
return 1
