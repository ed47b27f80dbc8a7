-- The registry of samplers: who may claim prompts.

local function sampler_key(id)
  return key('sampler', id)
end

-- A process whose name was taken by a later start is refused wherever it sends its generation ('' is not checked).
-- A Redis that lost the last start knows a lower one.
local function replaced(name, generation)
  return generation ~= '' and number_of(key('generations'), name, 0) > tonumber(generation)
end

local function refuse_replaced(name, generation)
  if replaced(name, generation) then
    return refuse('FencedError', 'service ' .. name .. ' was replaced by a later start of it')
  end
end

-- A Redis that has lost its last writes may not know this start, which then registers again.
local function refuse_unknown(name, generation)
  if number_of(key('generations'), name, 0) < (tonumber(generation) or 0) then
    return refuse('LostWritesError', 'has lost the registration of ' .. name)
  end
end

-- It is at least the clock, like a fencing token: a start that Redis has lost and the next one are told apart.
local function next_generation(name)
  local last = number_of(key('generations'), name, 0)
  local generation = string.format('%.0f', math.max(last + 1, CLOCK[1] * 1000000 + CLOCK[2]))
  redis.call('HINCRBY', key('starts'), name, 1)
  redis.call('HSET', key('generations'), name, generation)
  return generation
end

local function admit_sampler(id, version, incarnation)
  redis.call('HSET', sampler_key(id), 'state', 'LIVE', 'version', version, 'incarnation', incarnation)
end

-- Every LIVE sampler becomes STALE, except those that have this version of this incarnation (nil: none has).
-- `admitted` has those that are known to.
local function outdate_samplers(version, incarnation, admitted)
  for _, id in ipairs(redis.call('SMEMBERS', key('samplers'))) do
    local known = admitted and admitted[id]
    local sampler = known and {} or redis.call('HMGET', sampler_key(id), 'state', 'version', 'incarnation')
    local current = sampler[2] == version and sampler[3] == incarnation
    if sampler[1] == 'LIVE' and not current then redis.call('HSET', sampler_key(id), 'state', 'STALE') end
  end
end

-- Only a sampler with the published version may claim prompts.
local function not_admitted(id, generation)
  local sampler = redis.call('HMGET', sampler_key(id), 'state', 'version')
  local published = redis.call('HGET', META, 'published_version') or '-1'
  local refusal = refuse_unknown(id, generation) or refuse_replaced(id, generation)
  if refusal then return refusal end
  if not sampler[1] then return refuse('NotAdmittedError', 'sampler ' .. id .. ' has not registered') end
  if redis.call('SISMEMBER', key('paused'), id) == 1 or redis.call('SISMEMBER', key('paused'), '*') == 1 then
    return refuse('NotAdmittedError', 'sampler ' .. id .. ' is paused until it is resumed')
  end
  for _, order in ipairs({ 'standby', 'left' }) do
    if redis.call('SISMEMBER', key(order), id) == 1 then
      return refuse('NotAdmittedError', 'sampler ' .. id .. ' is not among the samplers that are ordered')
    end
  end
  if published == '-1' then return refuse('NotAdmittedError', 'no version is published yet') end
  if sampler[1] ~= 'LIVE' or sampler[2] ~= published then
    local text = 'sampler ' .. id .. ' is ' .. sampler[1] .. ' at version ' .. sampler[2]
    return refuse('NotAdmittedError', text .. ', published is ' .. published)
  end
end
