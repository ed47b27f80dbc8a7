-- ARGV: worker. Returns its leases, because it has restarted; this counts as no failure. Answers 0 while some are left.
local leases = key('leases', ARGV[1])
for _, id in ipairs(redis.call('ZREVRANGE', leases, 0, CHUNK - 1)) do -- the first claimed comes to the front
  requeue(id, string.match(redis.call('HGET', STATES, id), '^(%a+)_leased$'), 'front')
end
signal('prompts')
signal('generated')
return 1 - redis.call('EXISTS', leases)
