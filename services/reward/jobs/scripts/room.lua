-- Put before the verbs that ask whether there is room: for a chunk of so many bytes in a job, and for what is kept of jobs.

local function has_room(job, num_bytes)
  local limit, bytes = number_of(META, 'max_unscored_bytes', 2 ^ 28), num_bytes + CHUNK_OVERHEAD_BYTES
  local total = number_of(META, 'unscored_bytes', 0)
  -- What is alone always finds room, however large.
  local fits = total == 0 or total + bytes <= limit
  return fits and (job.unscored_bytes == 0 or job.unscored_bytes + bytes <= limit / 2)
end

-- A job keeps its results while it goes on. So it is beyond the limit that no more is taken, once nothing is left to be given up.
local function refuse_beyond_results(id, job)
  local limit = most_result_bytes()
  if job and job.result_bytes > limit / 2 then
    local text = 'job ' .. id .. ' has results of ' .. job.result_bytes .. ' bytes, and one job may have half of jobs.max_result_bytes = '
    return refuse('JOBLIMIT', text .. limit .. '; raise that, or cancel this job, which keeps its results, and submit the rest as others')
  end
  give_up_results()
  local bytes = number_of(META, 'result_bytes', 0)
  if bytes > limit then
    local text = 'jobs that have not ended, and records of those that have, keep ' .. bytes .. ' bytes, more than jobs.max_result_bytes = '
    return refuse('JOBLIMIT', text .. limit .. '; try again when some have ended, delete jobs, or raise it')
  end
end
