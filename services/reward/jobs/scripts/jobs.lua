-- Prefix of every job script: keys, queues and figures. A job is job:<id> (figures), rubric:<id> until it has ended,
-- and four hashes: items:<id>, partials:<id> and chunks:<id> by index, for the chunks without a result, and
-- results:<id> by cursor. A chunk is in `waiting` (by place) or in `leased` (by expiry) as "<id>:<index>".

local JOBS = PREFIX .. 'jobs' -- job id by order of creation; jobs_of:<owner> likewise for one owner
local BY_KEY = PREFIX .. 'by_key' -- <owner>:<idempotency key> -> job id; names of owners have no colon
local EVERYBODY = '*' -- in place of an owner: may see and end the jobs of all
local EXPIRING = PREFIX .. 'expiring' -- job id by when to look whether it can be forgotten
local ENDED = PREFIX .. 'ended' -- job id by order of ending, of those that can give up results
local WAITING = PREFIX .. 'waiting'
local LEASED = PREFIX .. 'leased'
local SIGNAL = PREFIX .. 'signal:waiting'
local MAX_SIGNALS = 64
local LOOKS = 64 -- leases and jobs that one verb looks after at most, so that none takes long
local CHUNK_OVERHEAD_BYTES = 1024 -- what Redis needs for a chunk besides its items
local RECORD_BYTES = 4096 -- what Redis needs for a job besides its rubric, chunks and results
local RESULT_OVERHEAD_BYTES = 256 -- and for the results of a chunk besides themselves
local PLACES_A_PRIORITY = 2 ^ 44 -- 200 priorities of so many places each are exact in a double

local function count(name, by)
  return redis.call('HINCRBY', META, name, by or 1)
end

local function chunk_name(id, index)
  return id .. ':' .. index
end

local function chunk_of(id, index)
  local text = redis.call('HGET', key('chunks', id), index)
  return text and cjson.decode(text)
end

local function keep(id, index, chunk)
  redis.call('HSET', key('chunks', id), index, cjson.encode(chunk))
end

local function figures_of(id)
  local flat = redis.call('HGETALL', key('job', id))
  local figures = {}
  for i = 1, #flat, 2 do
    figures[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1]
  end
  return #flat > 0 and figures
end

-- The figures of a job that this caller may see. A job of another owner is unknown to it.
local function figures_for(caller, id)
  if caller ~= EVERYBODY and redis.call('HGET', key('job', id), 'owner') ~= caller then return false end
  return figures_of(id)
end

local function num_waiting(job)
  local waiting = job.num_items - job.num_scored
  for name, number in pairs(job) do
    if string.sub(name, 1, 9) == 'unscored:' then waiting = waiting - number end
  end
  return waiting
end

local function snapshot(id)
  local flat = redis.call('HGETALL', key('job', id))
  flat[#flat + 1] = 'job_id'
  flat[#flat + 1] = id
  return flat
end

local function unknown(id)
  local why = 'it was never submitted, or it was deleted or forgotten'
  return refuse('UnknownJobError', 'there is no job ' .. id .. '; ' .. why)
end

local function retention_ms()
  return number_of(META, 'retention_ms', 604800000)
end

-- The signal list holds a token for each waiting chunk (at most MAX_SIGNALS). A blocked claimer takes one and claims.
local function signal()
  local waiting = redis.call('ZCARD', WAITING)
  if waiting == 0 then
    redis.call('DEL', SIGNAL)
    return
  end
  local missing = {}
  for i = 1, math.min(waiting, MAX_SIGNALS) - redis.call('LLEN', SIGNAL) do missing[i] = '1' end
  if #missing > 0 then redis.call('RPUSH', SIGNAL, unpack(missing)) end
end

-- Returns chunks with an expired lease to their old place in the queue. The holder died, or a pause ended (which is a
-- lease without a holder).
local function take_back(name)
  local id, index = string.match(name, '^(%x+):(%d+)$')
  local chunk = chunk_of(id, index)
  redis.call('ZREM', LEASED, name)
  if chunk.worker ~= '' then
    chunk.losses = chunk.losses + 1
    chunk.lost[chunk.token] = 1
    count('leases_expired')
  end
  chunk.worker, chunk.token = '', ''
  keep(id, index, chunk)
  redis.call('ZADD', WAITING, chunk.place, name)
end

local function sweep_leases()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', LEASED, '-inf', NOW_MS, 'LIMIT', 0, LOOKS)) do
    take_back(name)
  end
end

local function holds(chunk, token)
  return chunk and chunk.token ~= '' and chunk.token == token
end

-- A holder that reports a lease it has lost did not die of the chunk, so that loss does not count.
local function forgive(id, index, chunk, token)
  if chunk and chunk.lost[token] then
    chunk.losses, chunk.lost[token] = chunk.losses - 1, nil
    keep(id, index, chunk)
  end
end

-- Progress extends a job's retention. An open job with nothing waiting is deleted after it.
local function touch(id)
  redis.call('ZADD', EXPIRING, WALL_MS + retention_ms(), id)
end

-- Bytes kept for jobs: records, rubrics of unfinished jobs, results.
local function hold(id, bytes)
  redis.call('HINCRBY', key('job', id), 'result_bytes', bytes)
  count('result_bytes', bytes)
end

local function most_result_bytes()
  return number_of(META, 'max_result_bytes', 2 ^ 29)
end

-- Deletes the results of ended jobs, the earliest first, until the limit holds. One job can be spared.
local function give_up_results(spared)
  local above = number_of(META, 'result_bytes', 0) - most_result_bytes()
  if above <= 0 then return end
  for _, id in ipairs(redis.call('ZRANGE', ENDED, 0, LOOKS)) do
    if id ~= spared and above > 0 then
      local bytes = number_of(key('job', id), 'result_bytes', 0) - RECORD_BYTES
      redis.call('UNLINK', key('results', id))
      redis.call('ZREM', ENDED, id)
      redis.call('HSET', key('job', id), 'state', 'EXPIRED')
      hold(id, 0 - bytes)
      count('jobs_expired')
      above = above - bytes
    end
  end
end

local function finish(id, state)
  local expires = string.format('%.0f', WALL_MS + retention_ms())
  redis.call('HSET', key('job', id), 'state', state, 'finished_ms', WALL_MS, 'expires_ms', expires)
  touch(id)
  hold(id, 0 - redis.call('STRLEN', key('rubric', id)))
  redis.call('UNLINK', key('items', id), key('partials', id), key('chunks', id), key('rubric', id))
  if number_of(key('job', id), 'num_results', 0) > 0 then redis.call('ZADD', ENDED, count('jobs_ended'), id) end
end

-- The first write needs no memory: Redis accepts it even when it is full.
local function forget(id)
  redis.call('UNLINK', key('results', id), key('rubric', id))
  local bytes, owner, name = unpack(redis.call('HMGET', key('job', id), 'result_bytes', 'owner', 'idempotency_key'))
  redis.call('HDEL', BY_KEY, owner .. ':' .. name)
  for _, queue in ipairs({ EXPIRING, JOBS, key('jobs_of', owner), ENDED }) do
    redis.call('ZREM', queue, id)
  end
  redis.call('UNLINK', key('job', id))
  count('result_bytes', 0 - bytes)
end

local function forget_expired()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRING, '-inf', WALL_MS, 'LIMIT', 0, LOOKS)) do
    if num_waiting(figures_of(id)) > 0 then
      touch(id)
    else
      forget(id)
    end
  end
end
