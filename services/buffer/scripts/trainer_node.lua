-- One machine of a trainer on several machines reports its state and learns that of all.
-- ARGV: node (an id of its launcher), number of machines, state, generation of its ranks, exit code, lease in ms
-- Each machine has a seat, by which its ranks are numbered. A new generation means that the ranks of all machines start
-- anew: a rank failed, or a machine came or left. States: waiting (without ranks), running, finished, failed, ended
-- (gives up, and so do the others, with that exit code), left.
-- Returns: own seat or -1, generation, machines with a seat, machines that wait for this generation, 1 if all have
-- finished, the exit code with which all end or -1.
local NODES = key('trainer_nodes')
local NODE, NUM_NODES, STATE, RANKS_OF = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local EXIT_CODE, LEASE_MS = ARGV[5], tonumber(ARGV[6])

local function is_over(generation)
  return number_of(NODES, 'finished', -1) == generation or number_of(NODES, 'ended', -1) == generation
end

local function start_anew()
  redis.call('HINCRBY', NODES, 'generation', 1)
end

local function free(seat)
  redis.call('HDEL', NODES, 'node:' .. seat, 'beat:' .. seat, 'waits:' .. seat, 'done:' .. seat)
  if not is_over(number_of(NODES, 'generation', 0)) then start_anew() end
end

local own, unused
for seat = 0, NUM_NODES - 1 do
  local holder = redis.call('HGET', NODES, 'node:' .. seat)
  if holder and holder ~= NODE and number_of(NODES, 'beat:' .. seat, 0) + LEASE_MS < NOW_MS then
    free(seat)
    holder = nil
  end
  if holder == NODE then own = seat end
  if not holder then unused = unused or seat end
end

if STATE == 'left' then
  if own then free(own) end
  own = nil
elseif not own and unused then
  own = unused
  redis.call('HSET', NODES, 'node:' .. own, NODE)
  start_anew()
end

local generation = number_of(NODES, 'generation', 0)
if own then
  redis.call('HSET', NODES, 'beat:' .. own, NOW_MS)
  if STATE == 'failed' and RANKS_OF == generation then
    start_anew()
    generation = generation + 1
  elseif STATE == 'ended' then
    redis.call('HSET', NODES, 'ended', generation, 'exit_code', EXIT_CODE)
  elseif STATE == 'waiting' then
    redis.call('HSET', NODES, 'waits:' .. own, generation)
  elseif STATE == 'finished' and RANKS_OF == generation then
    redis.call('HSET', NODES, 'done:' .. own, generation)
  end
end

local seated, waiting, done = 0, 0, 0
for seat = 0, NUM_NODES - 1 do
  if redis.call('HEXISTS', NODES, 'node:' .. seat) == 1 then seated = seated + 1 end
  if number_of(NODES, 'waits:' .. seat, -1) == generation then waiting = waiting + 1 end
  if number_of(NODES, 'done:' .. seat, -1) == generation then done = done + 1 end
end
if done == NUM_NODES then redis.call('HSET', NODES, 'finished', generation) end
local finished = number_of(NODES, 'finished', -1) == generation and 1 or 0
local exit_code = -1
if number_of(NODES, 'ended', -1) == generation then exit_code = number_of(NODES, 'exit_code', 1) end
return {own or -1, generation, seated, waiting, finished, exit_code}
