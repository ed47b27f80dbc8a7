-- Put before every verb, of the ring and of jobs: the clock, keys, refusals, remembered answers, fencing tokens.
-- KEYS[1] is the meta hash of a run or namespace, "…{name}:meta". Every other key has its prefix, hence its hash tag and slot.
-- A script is not undone when it fails half way: a verb judges everything first and writes afterwards.

local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local ANSWER_MS = 60000

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

-- A caller whose answer was lost asks again under the same request id and gets the same answer.
local function remembered(request)
  return redis.call('GET', key('answer', request))
end

local function remember(request, answer)
  redis.call('SET', key('answer', request), answer, 'PX', ANSWER_MS)
  return answer
end

-- Redis judges memory at a script's first write. This one changes nothing: a full Redis refuses the whole verb here.
local function refuse_when_full()
  redis.call('HSETNX', META, 'created_by', '')
end

-- Fencing tokens grow even over a restart that lost writes: the clock is their floor.
local function next_token()
  local token = string.format('%.0f', math.max(number_of(META, 'token', 0) + 1, CLOCK[1] * 1000000 + CLOCK[2]))
  redis.call('HSET', META, 'token', token)
  return token
end
