-- ARGV: request, stage, worker, generation, n, lease in ms. Returns id, token, payload, partial of each claim.
local stage = ARGV[2]
sweep(stage)
local check = stage == 'prompts' and not_admitted or refuse_replaced
local refusal = check(ARGV[3], ARGV[4])
if refusal then
  signal(stage) -- this worker may have taken a token that another one needs
  return refusal
end

local claimed = {}
local answer = remembered(ARGV[1])
if answer then
  claimed = cjson.decode(answer)
else
  local ids = redis.call('ZRANGE', key(stage .. '_waiting'), 0, ARGV[5] - 1)
  local tokens = next_tokens(#ids)
  for i, id in ipairs(ids) do
    local token = tokens[i]
    leave(id)
    enter(id, stage .. '_leased', NOW_MS + ARGV[6])
    redis.call('HSET', key('group', id), 'token', token, 'worker', ARGV[3], 'worker:' .. stage, ARGV[3])
    redis.call('ZADD', key('leases', ARGV[3]), token, id)
    claimed[#claimed + 1] = { id, token }
  end
  if #claimed > 0 then remember(ARGV[1], cjson.encode(claimed)) end
  signal(stage)
end

local reply = {}
for _, claim in ipairs(claimed) do
  local id, token = claim[1], claim[2]
  if holds(id, stage, token) then
    reply[#reply + 1] = id
    reply[#reply + 1] = token
    reply[#reply + 1] = redis.call('GET', key('payload', id))
    reply[#reply + 1] = redis.call('GET', key('partial', id))
  end
end
return reply
