-- ARGV: seconds. Returns the fields of every sampler as JSON, ordered by id.
local FIELDS = { 'address', 'state', 'version', 'incarnation', 'tensor_parallel_size', 'generation' }
local samplers = {}
local ids = redis.call('SMEMBERS', key('samplers'))
table.sort(ids)
for _, id in ipairs(ids) do
  local silent_ms = NOW_MS - number_of(key('beats'), id, 0)
  local sampler = { id = id, alive = silent_ms <= ARGV[1] * 1000 }
  for i, value in ipairs(redis.call('HMGET', sampler_key(id), unpack(FIELDS))) do
    sampler[FIELDS[i]] = i <= 2 and value or tonumber(value)
  end
  samplers[#samplers + 1] = sampler
end
return cjson.encode(samplers)
