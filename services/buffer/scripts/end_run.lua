-- ARGV: how the run ended (finished, stopped). The first one stays until the run is resumed.
local refusal = no_run()
if refusal then return refusal end
redis.call('HSETNX', META, 'ended', ARGV[1])
return 1
