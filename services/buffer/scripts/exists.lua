if redis.call('EXISTS', META) == 0 then return 0 end
return other_schema() or 1
