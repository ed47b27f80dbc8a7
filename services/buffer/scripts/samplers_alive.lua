-- ARGV: seconds. Returns of each sampler, ordered by id: id, address, state, version, incarnation,
-- tensor_parallel_size, whether it is alive (1|0), generation, number of starts.
local FIELDS = { 'address', 'state', 'version', 'incarnation', 'tensor_parallel_size' }
local function numbers(name)
  local found, values = {}, redis.call('HGETALL', key(name))
  for i = 1, #values, 2 do found[values[i]] = tonumber(values[i + 1]) end
  return found
end
local reply, beats, generations, starts = {}, numbers('beats'), numbers('generations'), numbers('starts')
local ids = redis.call('SMEMBERS', key('samplers'))
table.sort(ids)
for _, id in ipairs(ids) do
  local sampler = redis.call('HMGET', sampler_key(id), unpack(FIELDS))
  table.insert(sampler, 1, id)
  sampler[7] = NOW_MS - (beats[id] or 0) <= ARGV[1] * 1000 and 1 or 0
  sampler[8] = generations[id] or 0
  sampler[9] = starts[id] or 0
  for _, value in ipairs(sampler) do reply[#reply + 1] = value end
end
return reply
