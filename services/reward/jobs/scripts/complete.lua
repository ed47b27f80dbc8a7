-- ARGV: request, job id, index, token, results, number scored, sum of values, then reason and number of each kind of
-- unscored items. Returns whether the lease was current.
local answer = remembered(ARGV[1])
if answer then return tonumber(answer) end
sweep_leases()
local id, index = ARGV[2], ARGV[3]
local chunk = chunk_of(id, index)
if not holds(chunk, ARGV[4]) then
  forgive(id, index, chunk, ARGV[4])
  count('stale_results_refused')
  return 0
end
local num_results = tonumber(ARGV[6])
for i = 9, #ARGV, 2 do
  num_results = num_results + ARGV[i]
end
if num_results ~= chunk.items then
  local text = 'chunk ' .. chunk_name(id, index) .. ' has ' .. chunk.items .. ' items, not ' .. num_results
  return refuse('LedgerError', text)
end
refuse_when_full()

local job = key('job', id)
redis.call('HSET', key('results', id), redis.call('HINCRBY', job, 'num_results', 1), ARGV[5])
hold(id, #ARGV[5] + RESULT_OVERHEAD_BYTES)
redis.call('HINCRBY', job, 'num_scored', ARGV[6])
redis.call('HSET', job, 'sum_values', string.format('%.17g', redis.call('HGET', job, 'sum_values') + ARGV[7]))
for i = 8, #ARGV, 2 do
  redis.call('HINCRBY', job, 'unscored:' .. ARGV[i], ARGV[i + 1])
end
redis.call('HDEL', key('chunks', id), index)
redis.call('HDEL', key('items', id), index)
redis.call('HDEL', key('partials', id), index)
redis.call('ZREM', LEASED, chunk_name(id, index))
redis.call('HINCRBY', job, 'unscored_bytes', -chunk.bytes)
count('unscored_bytes', -chunk.bytes)
count('items_ended', chunk.items)
touch(id)
if redis.call('HINCRBY', job, 'open_chunks', -1) == 0 and redis.call('HGET', job, 'state') == 'RUNNING' then
  finish(id, 'DONE')
end
give_up_results(id)
return tonumber(remember(ARGV[1], 1))
