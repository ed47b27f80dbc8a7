-- ARGV: seconds. Returns for each sampler:
-- id, alive (0|1), address, state, version, incarnation, tensor_parallel_size, generation
local reply = {}
local ids = redis.call('SMEMBERS', key('samplers'))
table.sort(ids)
for _, id in ipairs(ids) do
  local silent_ms = NOW_MS - number_of(key('beats'), id, 0)
  reply[#reply + 1] = id
  reply[#reply + 1] = silent_ms <= ARGV[1] * 1000 and 1 or 0
  for _, field in ipairs({ 'address', 'state', 'version', 'incarnation', 'tensor_parallel_size', 'generation' }) do
    reply[#reply + 1] = redis.call('HGET', sampler_key(id), field)
  end
end
return reply
