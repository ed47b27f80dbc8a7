-- Prefix of every buffer script: key names, counters, fences, signals.

local COUNTERS = PREFIX .. 'counters'
local STATES = PREFIX .. 'states' -- group id -> the name of its state, which is also the name of the queue it stands in
local MAX_SIGNALS = 64
local SCHEMA = '2' -- of the keys; another one means other types under the same names

local function count(name, by)
  return redis.call('HINCRBY', COUNTERS, name, by or 1)
end

local function no_run()
  if redis.call('EXISTS', META) == 0 then return refuse('UnavailableError', 'was never created here') end
end

local function other_schema()
  local schema = redis.call('HGET', META, 'schema') or '1'
  if schema ~= SCHEMA then
    local text = 'has a ledger of schema ' .. schema .. ', and this version of Tandem reads schema ' .. SCHEMA
    return refuse('ConfigError', text .. '; finish the run with the version that began it, or start a new run')
  end
end

-- A call of the trainer ends with the number of the last change that was acknowledged to it, and the number of this
-- change: see services/buffer/trainer_calls.py. They are removed from ARGV.
local function fenced(incarnation)
  local number = tonumber(table.remove(ARGV))
  local acknowledged = tonumber(table.remove(ARGV))
  local current = redis.call('HGET', META, 'incarnation')
  if current ~= incarnation then
    local text = 'trainer incarnation ' .. incarnation .. ' is not the current one'
    return refuse('FencedError', text .. ' (' .. (current or 'none') .. ')')
  end
  local last = number_of(META, 'trainer_sequence', 0)
  if last < acknowledged then
    local text = 'has lost writes: it knows change ' .. last .. ' of the trainer as the last one, but acknowledged '
    return refuse('LostWritesError', text .. acknowledged)
  end
  if number > last then
    redis.call('HDEL', META, '') -- the first write of a script must need no memory, for the trainer makes room
    redis.call('HSET', META, 'trainer_sequence', number)
  end
end

-- The signal list of a stage holds a token for each waiting group (at most MAX_SIGNALS). A blocked claimer takes one
-- and claims.
local function signal(stage)
  local queue, list = key(stage .. '_waiting'), key('signal', stage)
  local waiting = redis.call('ZCARD', queue)
  if waiting == 0 then
    redis.call('DEL', list)
    return
  end
  local missing = {}
  for i = 1, math.min(waiting, MAX_SIGNALS) - redis.call('LLEN', list) do missing[i] = '1' end
  if #missing > 0 then redis.call('RPUSH', list, unpack(missing)) end
end
