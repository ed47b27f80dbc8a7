-- Prefix of every script: the clock, keys, refusals, remembered answers, fencing tokens.
-- KEYS[1] is the meta hash of a run or namespace, "…{name}:meta". Every other key has its prefix, and so its hash slot.
-- Redis does not roll back a script that fails half way, so a script checks everything before it writes.

local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local ANSWER_MS = 60000

local LONGEST_STEP_MS = 5000 -- services call every second

local function key(name, id)
  if id then return PREFIX .. name .. ':' .. id end
  return PREFIX .. name
end

-- Leases and heartbeats are measured by NOW_MS. It follows the clock of Redis' host but does not jump with it: where
-- that was set back, NOW_MS goes on from the last call, and between two calls it grows by at most LONGEST_STEP_MS. So
-- nothing expires because a clock was set or Redis stood still. The last time is written once a second, so that most
-- calls that only read write nothing; a full Redis does not write it (pcall), and the next call tries again.
local CLOCK = redis.call('TIME')
local WALL_MS = CLOCK[1] * 1000 + math.floor(CLOCK[2] / 1000)
local NOW_MS
do
  local last = redis.call('HMGET', key('clock'), 'wall_ms', 'offset_ms')
  local step_ms, offset_ms = WALL_MS - (last[1] or 0), last[2] or 0
  if last[1] then offset_ms = offset_ms + math.min(math.max(step_ms, 0), LONGEST_STEP_MS) - step_ms end
  NOW_MS = WALL_MS + offset_ms
  if (step_ms < 0 or step_ms >= 1000) and redis.call('EXISTS', META) == 1 then
    redis.pcall('HSET', key('clock'), 'wall_ms', WALL_MS, 'offset_ms', offset_ms)
  end
end

-- `class` is the error that the client raises, a class of protos/errors.py.
local function refuse(class, text)
  return redis.error_reply(class .. ' ' .. text)
end

local function number_of(hash, field, default)
  return tonumber(redis.call('HGET', hash, field) or default)
end

-- A caller that lost the answer repeats the request id and gets the same answer.
local function remembered(request)
  return redis.call('GET', key('answer', request))
end

local function remember(request, answer)
  redis.call('SET', key('answer', request), answer, 'PX', ANSWER_MS)
  return answer
end

-- Redis checks its memory limit at a script's first write. This write changes nothing, so a full Redis refuses here.
local function refuse_when_full()
  redis.call('HSETNX', META, 'created_by', '')
end

-- Fencing tokens grow even after a restart that lost writes, because they are at least the clock.
local function next_tokens(n)
  local first, tokens = math.max(number_of(META, 'token', 0) + 1, CLOCK[1] * 1000000 + CLOCK[2]), {}
  for i = 1, n do tokens[i] = string.format('%.0f', first + i - 1) end
  if n > 0 then redis.call('HSET', META, 'token', tokens[n]) end
  return tokens
end
