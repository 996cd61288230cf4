-- Reads what is under a name, whatever it is, for the audit.
-- KEYS  1 entry or mark
-- Reply {DONE, ms left, epoch, fence, body} an entry   {BUSY, ms left, holder} a mark   {FOREIGN, ms left, type}   {MISS}
-- Without a time to live, ms left is -1.
-- One step: what is compared with PostgreSQL must have been there at one moment.
local kind = redis.call('TYPE', KEYS[1]).ok
local left = redis.call('PTTL', KEYS[1])
if kind == 'none' then
	return {MISS}
end
if kind == 'hash' then
	local entry = redis.call('HMGET', KEYS[1], 'epoch', 'fence', 'body')
	return {DONE, left, entry[1] or '', entry[2] or '', entry[3] or ''}
end
if kind == 'string' then
	return {BUSY, left, redis.call('GET', KEYS[1])}
end
return {FOREIGN, left, kind}
