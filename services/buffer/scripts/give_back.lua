-- ARGV: worker. Returns its leases, because it has restarted: one that stops in order has released them.
-- Answers 0 while some are left.
local leases = key('leases', ARGV[1])
for _, id in ipairs(redis.call('ZREVRANGE', leases, 0, CHUNK - 1)) do -- the first claimed comes to the front
  lose_holder(id, string.match(redis.call('HGET', STATES, id), '^(%a+)_leased$'))
end
signal('prompts')
signal('generated')
return 1 - redis.call('EXISTS', leases)
