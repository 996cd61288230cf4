-- Asks whether a key may go on to PostgreSQL, and marks it as running.
-- KEYS  1 entry  2 mark
-- ARGV  1 epoch  2 holder (attempt token and fingerprint)  3 length of the token  4 time to live of the mark, ms
-- Reply {DONE, body} nothing is marked   {OK}   {BUSY, holder, ms left}
-- One step: between a look and a mark the answer could be published, and its duplicate would run.
-- Sent again by the same attempt it finds its own mark and says OK again.
local entry = redis.call('HMGET', KEYS[1], 'epoch', 'body')
if entry[1] == ARGV[1] then
	return {DONE, entry[2]}
end
local held = redis.call('GET', KEYS[2])
if held and string.sub(held, 1, ARGV[3]) ~= string.sub(ARGV[2], 1, ARGV[3]) then
	return {BUSY, held, redis.call('PTTL', KEYS[2])}
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
return {OK}
