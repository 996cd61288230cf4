-- Moves a state as its machine allows, once for each id of a transition; without an id it only looks.
-- KEYS  1 state  2 the transition's id; without it nothing is written
-- ARGV  1 epoch  2 the new state  3 time to live, ms  4... the states it may come from, '' for none
-- Reply {OK, from} moved, or might be   {SAME, state}   {REFUSED, state}   {MISS} no state is known
--       {MISMATCH, state} the id was used for that one
-- One step: between the look and the move another transition could pass, and between the move and the note of its id the
-- same one, sent again, would be told that it is refused.
-- Sent again it finds its id and says the same, whatever became of the state since. A MISS leaves its id unused.
local noted = {}
if KEYS[2] then
	noted = redis.call('HMGET', KEYS[2], 'to', 'code', 'from')
end
if noted[1] then
	if noted[1] ~= ARGV[2] then
		return {MISMATCH, noted[1]}
	end
	return {tonumber(noted[2]), noted[3]}
end
local there = redis.call('HMGET', KEYS[1], 'epoch', 'state')
local from, code = '', REFUSED
if there[1] == ARGV[1] then
	from = there[2] or ''
end
for i = 4, #ARGV do
	if ARGV[i] == from then
		code = OK
	end
end
if from == ARGV[2] then
	code = SAME
elseif from == '' and code == REFUSED then
	return {MISS}
end
if KEYS[2] then
	if code == OK then
		redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', ARGV[2])
		redis.call('PEXPIRE', KEYS[1], ARGV[3])
	end
	redis.call('HSET', KEYS[2], 'to', ARGV[2], 'code', code, 'from', from)
	redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
return {code, from}
