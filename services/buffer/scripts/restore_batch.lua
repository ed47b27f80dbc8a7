-- ARGV: incarnation, checkpoint version, a recorded version, its group ids
-- The disk is authoritative. Redis may have lost writes, so a recorded group can be in any state, or in none.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local version = tonumber(ARGV[3])
local is_later = version > tonumber(ARGV[2])

-- Restores the group as if it had just been admitted, outstanding, and then trained.
local function restore(id)
  local state, ended = leave(id), nil
  if not state then ended = fate(id) end
  if ended then
    mark(ended, id, 0)
    count(ended, -1)
    if ended ~= 'committed' then count('dropped', -1) end
  end
  redis.call('HDEL', key('set_aside'), id)
  redis.call('HDEL', key('suspected'), id)
  if state or ended then
    limiter.restore(id)
  else
    limiter.admit(id)
    mark('admitted', id, 1)
    redis.call('SADD', key('reentered'), id)
  end
  redis.call('DEL', key('payload', id), key('partial', id))
  redis.call('HDEL', key('group', id), 'token', 'worker', 'headers')
  enter(id, 'trained', version)
end

for i = 4, #ARGV do
  local id = ARGV[i]
  if is_later then
    restore(id)
  elseif not marked('committed', id) then
    if redis.call('HGET', STATES, id) ~= 'trained' then restore(id) end
    limiter.retire(id)
    commit_group(id)
  end
end
if is_later then -- its groups are outstanding, and may have been committed
  for _, field in ipairs({ 'published_version', 'committed_version' }) do
    if number_of(META, field, -1) >= version then redis.call('HSET', META, field, version - 1) end
  end
end
return 1
