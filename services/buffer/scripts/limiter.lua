-- The limiter. tests/services/buffer/test_buffer_model.py compares it with its Python twin.
-- outstanding, the size of a set, equals admitted - retired + restored. These three only grow.

local OUTSTANDING = PREFIX .. 'outstanding'
local CREDITS_SIGNAL = PREFIX .. 'signal:credits' -- one token at most
local limiter = {}

function limiter.free()
  local budget = (number_of(META, 'staleness_budget', 0) + 1) * number_of(META, 'groups_per_batch', 0)
  return math.max(0, budget - redis.call('SCARD', OUTSTANDING))
end

-- The number of groups that the run still needs. A dropped group is replaced.
function limiter.wanted()
  local dropped, admitted = number_of(COUNTERS, 'dropped', 0), number_of(COUNTERS, 'admitted', 0)
  return math.max(0, number_of(META, 'target_groups', 0) + dropped - admitted)
end

function limiter.admit(id)
  redis.call('SADD', OUTSTANDING, id)
  count('admitted')
end

-- Publication and a drop both return the credit, and both count as retired. The feed waits for the signal.
function limiter.retire(id)
  if redis.call('SREM', OUTSTANDING, id) == 0 then return end
  count('retired')
  if redis.call('EXISTS', CREDITS_SIGNAL) == 0 then redis.call('RPUSH', CREDITS_SIGNAL, '1') end
end

function limiter.restore(id)
  if redis.call('SADD', OUTSTANDING, id) == 1 then count('restored') end
end
