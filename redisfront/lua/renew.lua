-- Keeps an attempt's own mark alive.
-- KEYS  1 mark
-- ARGV  1 attempt token  2 time to live, ms
-- Reply {OK}   {KEPT} it is gone or somebody else's, and was left as it is
-- One step: a mark that ends between the look and the renewal may be the next owner's.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
	return {OK}
end
return {KEPT}
