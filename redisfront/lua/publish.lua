-- Stores a final record that PostgreSQL has committed, and removes its call's mark.
-- KEYS  1 entry  2 mark
-- ARGV  1 epoch  2 fence, 19 digits  3 body  4 time to live, ms  5 the call's mark, may be empty  6 channel
-- Reply {OK}   {KEPT} a newer one of the same epoch is there
-- One step: an older record that arrives late must not replace the one it was compared with.
-- Fences are compared as texts of equal length: Lua's numbers would round them.
local there = redis.call('HMGET', KEYS[1], 'epoch', 'fence')
local code = KEPT
if there[1] ~= ARGV[1] or there[2] <= ARGV[2] then
	redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'fence', ARGV[2], 'body', ARGV[3])
	redis.call('PEXPIRE', KEYS[1], ARGV[4])
	code = OK
end
local held = redis.call('GET', KEYS[2])
if held and #ARGV[5] > 0 and string.sub(held, 1, #ARGV[5]) == ARGV[5] then
	redis.call('DEL', KEYS[2])
end
redis.call('PUBLISH', ARGV[6], '')
return {code}
