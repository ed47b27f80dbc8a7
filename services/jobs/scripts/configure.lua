-- ARGV: retention in ms, most bytes of unscored chunks
redis.call('HSET', META, 'retention_ms', ARGV[1], 'max_unscored_bytes', ARGV[2])
return 1
