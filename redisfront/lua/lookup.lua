-- Reads what is known of a key.
-- KEYS  1 entry  2 mark
-- ARGV  1 epoch
-- Reply {DONE, body}   {BUSY, holder, ms left}   {MISS}
-- One step: read one after the other, a key that is done in between would look like one nobody knows.
local entry = redis.call('HMGET', KEYS[1], 'epoch', 'body')
if entry[1] == ARGV[1] then
	return {DONE, entry[2]}
end
local held = redis.call('GET', KEYS[2])
if held then
	return {BUSY, held, redis.call('PTTL', KEYS[2])}
end
return {MISS}
