-- Notes a state that PostgreSQL has committed.
-- KEYS  1 mirror
-- ARGV  1 epoch  2 state  3 time to live, ms  4... the states that come after it and never before
-- Reply {OK}   {KEPT} a later state of the same epoch is there
-- One step: an older state that arrives late must not replace the one it was compared with.
local there = redis.call('HMGET', KEYS[1], 'epoch', 'state')
if there[1] == ARGV[1] then
	for i = 4, #ARGV do
		if ARGV[i] == there[2] then
			return {KEPT}
		end
	end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {OK}
