-- Prefix of the scripts that check limits: room for a chunk in a job, and bytes kept for jobs.

local function has_room(job, num_bytes)
  local limit, bytes = number_of(META, 'max_unscored_bytes', 2 ^ 28), num_bytes + CHUNK_OVERHEAD_BYTES
  local total = number_of(META, 'unscored_bytes', 0)
  -- A chunk that is alone is always accepted, whatever its size.
  local fits = total == 0 or total + bytes <= limit
  return fits and (job.unscored_bytes == 0 or job.unscored_bytes + bytes <= limit / 2)
end

-- A job that has not ended keeps its results. So if the limit is passed and no ended job has results to delete, no more
-- is accepted.
local function refuse_beyond_results(id, job)
  local limit = most_result_bytes()
  if job and job.result_bytes > limit / 2 then
    local text = 'job ' .. id .. ' has results of ' .. job.result_bytes .. ' bytes, and one job may have half of '
      .. 'jobs.max_result_bytes = ' .. limit
    local remedy = 'raise that, or cancel this job, which keeps its results, and submit the rest as others'
    return refuse('JobLimitError', text .. '; ' .. remedy)
  end
  give_up_results()
  local bytes = number_of(META, 'result_bytes', 0)
  if bytes > limit then
    local text = 'jobs that have not ended, and records of those that have, keep ' .. bytes .. ' bytes, more than '
      .. 'jobs.max_result_bytes = ' .. limit
    return refuse('JobLimitError', text .. '; try again when some have ended, delete jobs, or raise it')
  end
end
