-- Figures of the namespace.
local figures = { 'jobs', redis.call('ZCARD', JOBS), 'chunks_waiting', redis.call('ZCARD', WAITING) }
figures[#figures + 1] = 'chunks_leased'
figures[#figures + 1] = redis.call('ZCARD', LEASED)
local sums = { 'jobs_submitted', 'jobs_expired', 'items_ended', 'leases_expired', 'stale_results_refused' }
for _, name in ipairs({ 'unscored_bytes', 'result_bytes', unpack(sums) }) do
  figures[#figures + 1] = name
  figures[#figures + 1] = number_of(META, name, 0)
end
return figures
