-- ARGV: worker. It has just started, so the chunks held under its name wait again. Returns their number.
sweep_leases()
local taken = 0
for _, name in ipairs(redis.call('ZRANGE', LEASED, 0, -1)) do
  local id, index = string.match(name, '^(%x+):(%d+)$')
  if chunk_of(id, index).worker == ARGV[1] then
    take_back(name)
    taken = taken + 1
  end
end
if taken > 0 then signal() end
return taken
