-- Returns name, figure, name, figure, …
sweep('prompts')
sweep('generated')
local reply = redis.call('HGETALL', COUNTERS)
local function add(name, figure)
  reply[#reply + 1] = name
  reply[#reply + 1] = figure
end
for _, stage in ipairs({ 'prompts', 'generated' }) do
  add(stage .. '_waiting', redis.call('ZCARD', key(stage .. '_waiting')))
  add(stage .. '_leased', redis.call('ZCARD', key(stage .. '_leased')))
end
for _, state in ipairs({ 'scored_waiting', 'scored_claimed', 'trained' }) do
  add(state, redis.call('ZCARD', key(state)))
end
add('outstanding', redis.call('SCARD', OUTSTANDING))
add('published_version', number_of(META, 'published_version', -1))
add('set_aside', redis.call('HLEN', key('set_aside')))
add('consecutive_drops', number_of(META, 'consecutive_drops', 0))
add('incarnation', number_of(META, 'incarnation', 0))
return reply
