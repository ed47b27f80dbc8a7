-- ARGV: incarnation, version. Commits one version, and answers 0 while another one up to `version` is left.
-- A trainer may die between two calls: a published version stays trained, and the next rollback commits it.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local published = number_of(META, 'published_version', -1)
if tonumber(ARGV[2]) > published then
  local text = 'version ' .. ARGV[2] .. ' cannot be committed before it is published'
  return refuse('LedgerError', text .. ' (' .. published .. ' is)')
end
local ids, version = next_trained('-inf', ARGV[2])
for _, id in ipairs(ids) do commit_group(id) end
-- Not beyond a gap: if Redis lost the record of a version, its groups are not committed, and a rollback needs them.
local committed = number_of(META, 'committed_version', 0)
if version == committed + 1 then redis.call('HSET', META, 'committed_version', version) end
return #next_trained('-inf', ARGV[2]) == 0 and 1 or 0
