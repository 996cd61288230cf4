-- Removes what the audit found wrong, if it is still what was found.
-- KEYS  1 entry or mark
-- ARGV  1 channel, empty for an entry  2.. what inspect.lua said after ms left: epoch, fence, body, or holder, or type
-- Reply {OK}   {KEPT} something else is there   {MISS} nothing is
-- One step: between a look and the removal somebody may store what is right.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
	return {MISS}
end
local same
if kind == 'hash' then
	local entry = redis.call('HMGET', KEYS[1], 'epoch', 'fence', 'body')
	same = #ARGV == 4 and (entry[1] or '') == ARGV[2] and (entry[2] or '') == ARGV[3] and (entry[3] or '') == ARGV[4]
elseif kind == 'string' then
	same = #ARGV == 2 and redis.call('GET', KEYS[1]) == ARGV[2]
else
	same = #ARGV == 2 and kind == ARGV[2]
end
if not same then
	return {KEPT}
end
redis.call('DEL', KEYS[1])
if ARGV[1] ~= '' then
	redis.call('PUBLISH', ARGV[1], '')
end
return {OK}
