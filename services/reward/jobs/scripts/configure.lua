-- ARGV: retention in ms, limit in bytes of unscored chunks, limit in bytes of results
redis.call('HSET', META, 'retention_ms', ARGV[1], 'max_unscored_bytes', ARGV[2], 'max_result_bytes', ARGV[3])
return 1
