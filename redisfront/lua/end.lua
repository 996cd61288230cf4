-- Removes an attempt's own mark and wakes those who wait for it.
-- KEYS  1 mark
-- ARGV  1 attempt token  2 channel
-- Reply {OK}   {KEPT} there is none, or somebody else's
-- One step: a mark that ends between the look and the removal may be the next owner's.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then
	redis.call('DEL', KEYS[1])
	redis.call('PUBLISH', ARGV[2], '')
	return {OK}
end
return {KEPT}
