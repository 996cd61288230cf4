-- What the heal pass asks: it reads, and changes nothing here.

-- name: RecentOutcomes :many
-- A page of the keys whose outcome was recorded in a span of time. By the index for the purge: an outcome's age is its
-- retention less what is left of it. Those kept for ever are not in it.
SELECT tenant, operation, key, expires_at
FROM idempotency.records
WHERE expires_at > sqlc.arg('since')::timestamptz + sqlc.arg('retention_us')::bigint * interval '1 microsecond'
  AND expires_at <= sqlc.arg('until')::timestamptz + sqlc.arg('retention_us')::bigint * interval '1 microsecond'
  AND (expires_at, key, tenant, operation) >
      (sqlc.arg('after_expires_at')::timestamptz, sqlc.arg('after_key')::text, sqlc.arg('after_tenant')::text, sqlc.arg('after_operation')::text)
  AND operation = ANY (sqlc.arg('operations')::text[])
  AND (state = 'SUCCESS' OR state = 'FAILED' AND NOT retryable)
ORDER BY expires_at, key, tenant, operation
LIMIT sqlc.arg('batch');

-- name: KeysRunning :many
-- Which of these keys somebody runs right now: their lock is held, or their lease has not ended.
SELECT (l.classid::bigint << 32 | l.objid::bigint)::bigint AS lock_id
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory' AND l.objsubid = 1
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = ANY (@lock_ids::bigint[])
UNION
SELECT idempotency.lock_id(r.tenant, r.operation, r.key)::bigint
FROM idempotency.records AS r
WHERE r.state = 'PROCESSING' AND r.lease_expires_at > pg_catalog.statement_timestamp()
  AND idempotency.lock_id(r.tenant, r.operation, r.key) = ANY (@lock_ids::bigint[]);

-- name: OperationsSeen :many
-- The operations of what has been recorded lately, of what is to be forgotten next, and of what runs, with the longest
-- retention seen, 0 for none: for a person's tool, which has no declarations.
SELECT s.operation::text AS operation,
       COALESCE(EXTRACT(epoch FROM max(s.expires_at - s.completed_at)) * 1000000, 0)::bigint AS retention_us
FROM ((SELECT r.operation, r.expires_at, r.completed_at FROM idempotency.records AS r
       WHERE r.expires_at IS NOT NULL ORDER BY r.expires_at DESC LIMIT 10000)
      UNION ALL
      (SELECT r.operation, r.expires_at, r.completed_at FROM idempotency.records AS r
       WHERE r.expires_at > pg_catalog.statement_timestamp() ORDER BY r.expires_at LIMIT 10000)
      UNION ALL
      (SELECT r.operation, r.expires_at, r.completed_at FROM idempotency.records AS r
       WHERE r.state = 'PROCESSING' ORDER BY r.lease_expires_at LIMIT 10000)) AS s
GROUP BY s.operation
ORDER BY s.operation;
