-- Groups: their queues, their end (committed, dropped), and leases that run out.

local SILENT_MS = 3000 -- since the last heartbeat, which comes every second
local MOST_HOLDERS = 16
local MOST_NOTES = 8 -- of a group, the last ones: NOTES_BYTES in services/run/estimates.py
local MOST_SET_ASIDE = 1000 -- prompts of a run: SET_ASIDE_BYTES there
local DETAIL_LENGTH = 160
local CHUNK = 128 -- groups that one call moves at most, where their number may be large; each takes up to 80 µs
local LIVE = {
  'prompts_waiting', 'prompts_leased', 'generated_waiting', 'generated_leased', 'scored_waiting', 'scored_claimed',
}

-- A finished group keeps one bit in a bitmap of its epoch, so that no instance enters twice. The bitmaps have the names
-- of the counters that they must agree with: admitted, committed, dropped:<reason>.
local function bits_key(map, epoch)
  return key('bits', epoch .. ':' .. map)
end

local listed = {} -- bitmaps that this call has listed

local function mark(map, id, bit)
  local epoch, index = string.match(id, '^(%d+)%-(%d+)$')
  local bits = bits_key(map, epoch)
  redis.call('SETBIT', bits, index, bit)
  if listed[bits] then return end
  redis.call('SADD', key('epochs'), epoch)
  redis.call('SADD', key('maps', epoch), map)
  listed[bits] = true
end

local function marked(map, id)
  local epoch, index = string.match(id, '^(%d+)%-(%d+)$')
  return redis.call('GETBIT', bits_key(map, epoch), index) == 1
end

-- "committed", "dropped:<reason>", or nil if the group is in progress or was never admitted.
local function fate(id)
  for _, map in ipairs(redis.call('SMEMBERS', key('maps', string.match(id, '^%d+')))) do
    if map ~= 'admitted' and marked(map, id) then return map end
  end
end

-- `place` is the score in the queue of that state: `front`, `back`, or a number.
local function enter(id, state, place)
  if place == 'front' then place = redis.call('HINCRBY', META, 'front', -1) end
  if place == 'back' then place = redis.call('HINCRBY', META, 'back', 1) end
  redis.call('HSET', STATES, id, state)
  redis.call('ZADD', key(state), place, id)
end

-- Removes a group from its queue. Returns its state, its score there, and the holder of its lease.
local function leave(id)
  local state, worker = redis.call('HGET', STATES, id), nil
  if not state then return nil end
  local score = redis.call('ZSCORE', key(state), id)
  redis.call('ZREM', key(state), id)
  if state == 'prompts_leased' or state == 'generated_leased' then
    worker = redis.call('HGET', key('group', id), 'worker')
    redis.call('ZREM', key('leases', worker), id)
  end
  return state, score, worker
end

local function forget(id)
  redis.call('HDEL', STATES, id)
  redis.call('DEL', key('group', id), key('payload', id), key('partial', id))
end

local function drop(id, reason)
  leave(id)
  forget(id)
  mark('dropped:' .. reason, id, 1)
  count('dropped')
  count('dropped:' .. reason)
  limiter.retire(id)
  local reopened = redis.call('HGET', META, 'feed_done') == 'target' and limiter.wanted() > 0
  if reopened then redis.call('HDEL', META, 'feed_done') end
end

local function commit_group(id)
  leave(id)
  forget(id)
  mark('committed', id, 1)
  count('committed')
end

-- The groups of the first version above `above` that is trained, and that version; none if it is above `last`.
local function next_trained(above, last)
  local first = redis.call('ZRANGEBYSCORE', key('trained'), above, last, 'WITHSCORES', 'LIMIT', 0, 1)
  if #first == 0 then return {} end
  return redis.call('ZRANGEBYSCORE', key('trained'), first[2], first[2]), tonumber(first[2])
end

local function shortened(detail)
  return (string.gsub(string.sub(detail or '', 1, DETAIL_LENGTH), '%c', ' '))
end

-- Ends a lease without a result, and notes why.
local function requeue(id, stage, place, reason, detail)
  local _, _, worker = leave(id)
  redis.call('HDEL', key('group', id), 'token', 'worker')
  enter(id, stage .. '_waiting', place)
  local number = redis.call('HINCRBY', key('group', id), 'returns', 1)
  local note = cjson.encode({ number, WALL_MS, stage, worker, reason, shortened(detail) })
  redis.call('HSET', key('group', id), 'return:' .. number % MOST_NOTES, note)
end

-- A prompt that failed too often is not admitted again in later epochs, once another group is scored: until then the
-- scorer may be at fault, and `create` forgets the prompts that failed before it was mended.
local function suspect(id, reason, detail)
  if redis.call('HLEN', key('suspected')) < MOST_SET_ASIDE then
    redis.call('HSET', key('suspected'), id, reason .. ': ' .. shortened(detail))
  end
end

local function set_suspects_aside()
  local suspects = redis.call('HGETALL', key('suspected'))
  local room = MOST_SET_ASIDE - redis.call('HLEN', key('set_aside'))
  for i = 1, math.min(#suspects, 2 * room), 2 do
    redis.call('HSET', key('set_aside'), suspects[i], suspects[i + 1])
  end
  redis.call('DEL', key('suspected'))
end

-- A failure of a leased group: requeued until its budget for that kind is spent, then dropped with the reason.
local function fail(id, stage, kind, reason, place, detail)
  local failures = redis.call('HINCRBY', key('group', id), 'failures:' .. kind, 1)
  if failures > number_of(META, 'failure_budget:' .. kind, MOST_HOLDERS) then
    drop(id, reason)
    if kind ~= 'infrastructure' then suspect(id, reason, detail) end
    redis.call('HINCRBY', META, 'consecutive_drops', 1)
    redis.call('HSETNX', key('drop_errors'), reason, detail or '')
    return 'dropped'
  end
  requeue(id, stage, place, reason, detail)
  return 'requeued'
end

-- A lease that ended with its holder costs no budget: at most one of the groups that it held is at fault. A group that
-- ends all its holders is dropped by a bound of its own; from the third one on it waits at the back, so that a service
-- that it ends completes others in between.
local function lose_holder(id, stage)
  local place = number_of(key('group', id), 'failures:holder', 0) < 2 and 'front' or 'back'
  fail(id, stage, 'holder', 'holders_lost', place, (MOST_HOLDERS + 1) .. ' services ended while they held the group')
end

local function is_silent(worker)
  local beat = redis.call('HGET', key('beats'), worker)
  return beat and NOW_MS - beat > SILENT_MS
end

-- Leases in the order in which they return to the front: the last claimed first, so that the first claimed is in front.
local function last_claimed_first(ids)
  local token = {}
  for _, id in ipairs(ids) do token[id] = tonumber(redis.call('HGET', key('group', id), 'token')) end
  table.sort(ids, function(a, b) return token[a] > token[b] end)
  return ids
end

-- Returns groups with an expired lease to their queue. What a call leaves over is expired all the same.
local function sweep(stage)
  local expired = redis.call('ZRANGEBYSCORE', key(stage .. '_leased'), '-inf', NOW_MS, 'LIMIT', 0, CHUNK)
  for _, id in ipairs(last_claimed_first(expired)) do
    count('leases_expired')
    if is_silent(redis.call('HGET', key('group', id), 'worker')) then
      lose_holder(id, stage)
    else
      fail(id, stage, 'infrastructure', 'lease_expired', 'front')
    end
  end
  if #expired > 0 then signal(stage) end
end

-- Is this lease the group's current one, and not expired?
local function holds(id, stage, token)
  local expiry = redis.call('ZSCORE', key(stage .. '_leased'), id)
  return expiry and tonumber(expiry) > NOW_MS and redis.call('HGET', key('group', id), 'token') == token
end
