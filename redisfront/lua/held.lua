-- Asks whether a mark is there.
-- KEYS  1 mark
-- Reply {BUSY}   {MISS}
-- A script only for one kind of reply: it reads.
if redis.call('EXISTS', KEYS[1]) == 1 then
	return {BUSY}
end
return {MISS}
