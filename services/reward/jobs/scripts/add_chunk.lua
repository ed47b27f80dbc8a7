-- ARGV: job id, index, number of items, items.
-- Returns whether the chunk is stored (0: there is no room yet), and the job.
local id, index, num_items = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local job = figures_of(id)
if not job then return unknown(id) end
if index < job.num_chunks then return { 1, snapshot(id) } end
if job.state ~= 'OPEN' then
  local text = 'job ' .. id .. ' is ' .. job.state .. ' with ' .. job.num_chunks .. ' chunks'
  return refuse('JobError', text .. ' and takes no more')
end
if index > job.num_chunks then
  local text = 'chunk ' .. index .. ' came before chunk ' .. job.num_chunks
  return refuse('DataError', text .. '; go on with next_chunk of the last reply')
end
if not has_room(job, #ARGV[4]) then return { 0, snapshot(id) } end
refuse_when_full()
local refusal = refuse_beyond_results(id, job)
if refusal then return refusal end

-- Start-time fair queueing: jobs of one priority take turns, so none waits until another has ended.
local start = math.max(number_of(META, 'served:' .. job.priority, 0), job.rank)
local place = string.format('%.0f', start - job.priority * PLACES_A_PRIORITY)
local bytes = #ARGV[4] + CHUNK_OVERHEAD_BYTES
keep(id, index, {
  first = job.num_items, items = num_items, bytes = bytes, place = place,
  attempts = 0, losses = 0, lost = {}, under_way = 0, worker = '', token = '',
})
redis.call('HSET', key('items', id), index, ARGV[4])
redis.call('HSET', key('job', id), 'num_chunks', index + 1, 'rank', string.format('%.0f', start + num_items))
redis.call('HINCRBY', key('job', id), 'num_items', num_items)
redis.call('HINCRBY', key('job', id), 'open_chunks', 1)
redis.call('HINCRBY', key('job', id), 'unscored_bytes', bytes)
count('unscored_bytes', bytes)
redis.call('ZADD', WAITING, place, chunk_name(id, index))
touch(id)
signal()
return { 1, snapshot(id) }
