-- ARGV: incarnation, checkpoint version, recorded batches as JSON [[version, [group id, ...]], ...] in order of version
-- The disk is authoritative. Redis may have lost writes, so a recorded group can be in any state, or in none.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local checkpoint, recorded = tonumber(ARGV[2]), cjson.decode(ARGV[3])

local version_of = {}
for _, batch in ipairs(recorded) do
  for _, id in ipairs(batch[2]) do
    if version_of[id] then
      local versions = version_of[id] .. ' and ' .. batch[1]
      return refuse('LedgerError', 'group ' .. id .. ' is recorded in versions ' .. versions)
    end
    version_of[id] = batch[1]
  end
end
local trained = redis.call('ZRANGE', key('trained'), 0, -1, 'WITHSCORES')
for i = 1, #trained, 2 do
  local id, version = trained[i], tonumber(trained[i + 1])
  if version_of[id] and version_of[id] ~= version then
    local text = 'group ' .. id .. ' is recorded in version ' .. version_of[id]
    return refuse('LedgerError', text .. ', but Redis knows it as trained in version ' .. version)
  end
  if version > checkpoint and not version_of[id] then
    local text = 'version ' .. version .. ' trained group ' .. id
    return refuse('LedgerError', text .. ', but no record of that version holds it; is its batch folder missing?')
  end
end

-- Restores the group as if it had just been admitted: outstanding, in no queue.
local function reclaim(id)
  local state, ended = leave(id), nil
  if not state then ended = fate(id) end
  if ended then
    mark(ended, id, 0)
    count(ended, -1)
    if ended ~= 'committed' then count('dropped', -1) end
  end
  if state or ended then
    limiter.restore(id)
  else
    limiter.admit(id)
    mark('admitted', id, 1)
    redis.call('SADD', key('reentered'), id)
  end
  redis.call('DEL', key('payload', id), key('partial', id))
  redis.call('HDEL', key('group', id), 'token', 'worker')
end

local last = checkpoint
for _, batch in ipairs(recorded) do
  last = math.max(last, batch[1])
  for _, id in ipairs(batch[2]) do
    local settled = marked('committed', id) or redis.call('HGET', STATES, id) == 'trained'
    if batch[1] > checkpoint or not settled then
      reclaim(id)
      enter(id, 'trained', batch[1])
    end
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('trained'), '-inf', checkpoint)) do
  limiter.retire(id)
  commit_group(id)
end
for _, id in ipairs(redis.call('ZRANGE', key('scored_claimed'), 0, -1)) do
  local _, sequence = leave(id)
  enter(id, 'scored_waiting', sequence)
end
redis.call('DEL', key('answer', 'scored'))
redis.call('HSET', META, 'published_version', checkpoint, 'recorded_version', last)
for _, stage in ipairs({ 'prompts', 'generated', 'scored' }) do signal(stage) end
return 1
