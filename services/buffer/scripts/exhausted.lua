sweep('prompts')
sweep('generated')
if redis.call('HEXISTS', META, 'feed_done') == 0 then return 0 end
for _, stage in ipairs({ 'prompts', 'generated' }) do
  if redis.call('ZCARD', key(stage .. '_waiting')) > 0 then return 0 end
  if redis.call('ZCARD', key(stage .. '_leased')) > 0 then return 0 end
end
return 1
