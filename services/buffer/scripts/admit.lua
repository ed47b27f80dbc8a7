-- ARGV: request, cursor after the last offered group, cursor that the feed knows ('' is not checked), then group id and
-- payload of each. Admits none if Redis has another cursor, because it has lost admissions: the feed reads it again.
local refusal = no_run()
if refusal then return refusal end
local answer = remembered(ARGV[1])
if answer then return tonumber(answer) end
if ARGV[3] ~= '' and redis.call('HGET', META, 'cursor') ~= ARGV[3] then return 0 end

local reentered = key('reentered') -- trained groups whose admission Redis had lost; a rollback entered them
local offered, seen = (#ARGV - 3) / 2, {}
for i = 1, offered do
  local id = ARGV[2 * i + 2]
  if seen[id] or (marked('admitted', id) and redis.call('SISMEMBER', reentered, id) == 0) then
    return refuse('DataError', 'group ' .. id .. ' was admitted before')
  end
  seen[id] = true
end

refuse_when_full()
local room = math.min(limiter.free(), limiter.wanted())
local taken, admitted = 0, false
for i = 1, offered do
  local id = ARGV[2 * i + 2]
  if redis.call('SREM', reentered, id) == 0 then
    if room == 0 then break end
    room = room - 1
    limiter.admit(id)
    mark('admitted', id, 1)
    redis.call('SET', key('payload', id), ARGV[2 * i + 3])
    redis.call('HSET', key('group', id), 'admitted', WALL_MS)
    enter(id, 'prompts_waiting', 'back')
    admitted = true
  end
  taken = i
end
if admitted then redis.call('HDEL', META, 'feed_done') end
if taken > 0 then redis.call('HSET', META, 'cursor', string.format('%.0f', ARGV[2] - (offered - taken))) end
signal('prompts')
remember(ARGV[1], taken)
return taken
