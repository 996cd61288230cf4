-- Forgets what is known of a key. The mark stays: it is its attempt's.
-- KEYS  1 entry
-- Reply {OK}   {MISS} there was nothing
if redis.call('DEL', KEYS[1]) == 1 then
	return {OK}
end
return {MISS}
