-- Put before every verb: key names, the clock, refusals, remembered answers, doorbells.
-- KEYS[1] is the run's meta hash, "tandem:{run}:meta". Every other key has its prefix, hence its hash tag and slot.
-- A script is not undone when it fails half way: a verb judges everything first and writes afterwards.

local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local COUNTERS = PREFIX .. 'counters'
local STATES = PREFIX .. 'states' -- group id -> the name of its state, which is also the name of the queue it stands in
local ANSWER_MS = 60000
local BELL_TOKENS = 64

local CLOCK = redis.call('TIME')
local NOW_MS = CLOCK[1] * 1000 + math.floor(CLOCK[2] / 1000)

local function key(name, id)
  if id then return PREFIX .. name .. ':' .. id end
  return PREFIX .. name
end

local function refuse(code, text)
  return redis.error_reply(code .. ' ' .. text)
end

local function number_of(hash, field, default)
  return tonumber(redis.call('HGET', hash, field) or default)
end

local function count(name, by)
  return redis.call('HINCRBY', COUNTERS, name, by or 1)
end

-- A caller whose answer was lost asks again under the same request id and gets the same answer.
local function remembered(request)
  return redis.call('GET', key('answer', request))
end

local function remember(request, answer)
  redis.call('SET', key('answer', request), answer, 'PX', ANSWER_MS)
  return answer
end

local function no_run()
  if redis.call('EXISTS', META) == 0 then return refuse('NORUN', 'was never created here') end
end

-- Redis judges memory at a script's first write. This one changes nothing: a full Redis refuses the whole verb here.
local function refuse_when_full()
  redis.call('HSETNX', META, 'created_by', '')
end

local function fenced(incarnation)
  local current = redis.call('HGET', META, 'incarnation')
  if current ~= incarnation then
    local text = 'trainer incarnation ' .. incarnation .. ' is not the current one'
    return refuse('FENCED', text .. ' (' .. (current or 'none') .. ')')
  end
end

-- Fencing tokens grow even over a restart that lost writes: the clock is their floor.
local function next_token()
  local token = string.format('%.0f', math.max(number_of(META, 'token', 0) + 1, CLOCK[1] * 1000000 + CLOCK[2]))
  redis.call('HSET', META, 'token', token)
  return token
end

-- The bell of a stage holds one token a waiting group (at most BELL_TOKENS): a blocked claimer takes one and looks.
local function ring(stage)
  local queue, bell = key(stage .. '_waiting'), key('bell', stage)
  local waiting = redis.call(stage == 'scored' and 'ZCARD' or 'LLEN', queue)
  if waiting == 0 then
    redis.call('DEL', bell)
    return
  end
  for _ = redis.call('LLEN', bell) + 1, math.min(waiting, BELL_TOKENS) do
    redis.call('RPUSH', bell, '1')
  end
end
