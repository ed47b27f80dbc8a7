-- ARGV: seconds. Returns the fields of every sampler as JSON, ordered by id.
local samplers = {}
local ids = redis.call('SMEMBERS', key('samplers'))
table.sort(ids)
for _, id in ipairs(ids) do
  local silent_ms = NOW_MS - number_of(key('beats'), id, 0)
  local sampler = { id = id, alive = silent_ms <= ARGV[1] * 1000 }
  for _, field in ipairs({ 'address', 'state' }) do
    sampler[field] = redis.call('HGET', sampler_key(id), field)
  end
  for _, field in ipairs({ 'version', 'incarnation', 'tensor_parallel_size' }) do
    sampler[field] = tonumber(redis.call('HGET', sampler_key(id), field))
  end
  sampler.generation = number_of(key('generations'), id, 0)
  samplers[#samplers + 1] = sampler
end
return cjson.encode(samplers)
