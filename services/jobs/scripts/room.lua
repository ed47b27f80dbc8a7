-- Put before the verbs that ask whether there is room for a chunk of so many bytes in a job.
local function has_room(job, num_bytes)
  local limit, bytes = number_of(META, 'max_unscored_bytes', 2 ^ 28), num_bytes + CHUNK_OVERHEAD_BYTES
  local total = number_of(META, 'unscored_bytes', 0)
  -- What is alone always finds room, however large.
  local fits = total == 0 or total + bytes <= limit
  return fits and (job.unscored_bytes == 0 or job.unscored_bytes + bytes <= limit / 2)
end
