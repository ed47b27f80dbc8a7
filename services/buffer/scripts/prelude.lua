-- Put before every verb of the ring: its key names, counters, fences, doorbells.

local COUNTERS = PREFIX .. 'counters'
local STATES = PREFIX .. 'states' -- group id -> the name of its state, which is also the name of the queue it stands in
local BELL_TOKENS = 64

local function count(name, by)
  return redis.call('HINCRBY', COUNTERS, name, by or 1)
end

local function no_run()
  if redis.call('EXISTS', META) == 0 then return refuse('NORUN', 'was never created here') end
end

local function fenced(incarnation)
  local current = redis.call('HGET', META, 'incarnation')
  if current ~= incarnation then
    local text = 'trainer incarnation ' .. incarnation .. ' is not the current one'
    return refuse('FENCED', text .. ' (' .. (current or 'none') .. ')')
  end
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
