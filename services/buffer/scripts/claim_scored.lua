-- ARGV: incarnation, request, n. Returns id and headers of each group, in order of completion.
-- The answer is kept until the next request, because these claims do not expire and a lost answer would lose them.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local last = key('answer', 'scored')
local ids = {}
if redis.call('HGET', last, 'request') == ARGV[2] then
  ids = cjson.decode(redis.call('HGET', last, 'ids'))
else
  ids = redis.call('ZRANGE', key('scored_waiting'), 0, ARGV[3] - 1)
  for _, id in ipairs(ids) do
    local _, sequence = leave(id)
    enter(id, 'scored_claimed', sequence)
  end
  if #ids > 0 then redis.call('HSET', last, 'request', ARGV[2], 'ids', cjson.encode(ids)) end
  signal('scored')
end
local reply = {}
for _, id in ipairs(ids) do
  reply[#reply + 1] = id
  reply[#reply + 1] = redis.call('HGET', key('group', id), 'headers')
end
return reply
