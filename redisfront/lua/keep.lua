-- Keeps the outcome of a call of Do, and removes its lock.
-- KEYS  1 entry  2 mark (the lock)
-- ARGV  1 epoch, a constant of Do  2 attempt token  3 body  4 time to live, ms  5 channel
-- Reply {OK} kept   {DONE, body} another call's outcome is there   {BUSY, holder, ms left} another call has the lock
-- One step: a late owner whose lock has ended must neither replace what came after it nor take the lock of who runs now.
-- One whose lock has ended, and whom nobody followed, is kept. Sent again by the same attempt it finds its own outcome.
local there = redis.call('HMGET', KEYS[1], 'epoch', 'token', 'body')
if there[1] == ARGV[1] then
	if there[2] == ARGV[2] then
		return {OK}
	end
	return {DONE, there[3]}
end
local held = redis.call('GET', KEYS[2])
if held and string.sub(held, 1, #ARGV[2]) ~= ARGV[2] then
	return {BUSY, held, redis.call('PTTL', KEYS[2])}
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'token', ARGV[2], 'body', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('DEL', KEYS[2])
redis.call('PUBLISH', ARGV[5], '')
return {OK}
