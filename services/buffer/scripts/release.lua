-- ARGV: request, group id, stage, token, reason, kind (infrastructure|data|voluntary), detail
local answer = remembered(ARGV[1])
if answer then return answer end
local id, stage, kind = ARGV[2], ARGV[3], ARGV[6]
sweep(stage)
if not holds(id, stage, ARGV[4]) then return 'refused' end
local outcome = 'requeued'
if kind == 'voluntary' then
  requeue(id, stage, 'front', ARGV[5], ARGV[7])
else
  outcome = fail(id, stage, kind, ARGV[5], 'back', ARGV[7]) -- what failed does not hold up the others
end
signal(stage)
return remember(ARGV[1], outcome)
