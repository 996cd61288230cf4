-- name: PolicyList :many
-- Everything a process must know, in one statement and so in one snapshot: the policies, and (guarded) for which operations a
-- key may have been executed without a record. bypasses holds few operations: each is one step along the index.
WITH RECURSIVE open AS (
    (SELECT b.operation::text AS operation
     FROM idempotency.bypasses AS b
     WHERE (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED' AND b.resolution IS DISTINCT FROM 'RERUN'
     ORDER BY b.operation
     LIMIT 1)
    UNION ALL
    SELECT (SELECT b.operation::text
            FROM idempotency.bypasses AS b
            WHERE (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED' AND b.resolution IS DISTINCT FROM 'RERUN'
              AND b.operation > o.operation
            ORDER BY b.operation
            LIMIT 1)
    FROM open AS o
    WHERE o.operation IS NOT NULL
)
SELECT p.scope, p.name, p.enforcement, p.percentage, p.strategy, p.local_front,
       COALESCE((extract(epoch FROM p.wait) * 1000000)::bigint, -1)::bigint AS wait_us, p.actor, p.reason, p.changed_at,
       COALESCE((SELECT max(c.id) FROM idempotency.policy_changes AS c WHERE c.scope = p.scope AND c.name = p.name), 0)::bigint AS change,
       false AS guarded
FROM idempotency.policies AS p
UNION ALL
SELECT 'operation', o.operation, '', 0, NULL, NULL, -1, NULL, NULL, pg_catalog.statement_timestamp(), 0, true
FROM open AS o
WHERE o.operation IS NOT NULL
UNION ALL
-- Where a policy was weaker a moment ago, calls that began under it may still commit what no list shows yet.
SELECT DISTINCT c.scope, c.name, '', 0, NULL::text, NULL::boolean, -1::bigint, NULL::text, NULL::text, pg_catalog.statement_timestamp(), 0::bigint, true
FROM idempotency.policy_changes AS c
WHERE c.changed_at > pg_catalog.statement_timestamp() - sqlc.arg('recent_us')::bigint * interval '1 microsecond'
  AND (c.old_row ->> 'enforcement' IN ('off', 'shadow') OR (c.old_row ->> 'percentage')::int < 100
       OR c.old_row IS NULL AND c.new_row ->> 'enforcement' = 'enforce') -- a new one may take keys out of a wider, weaker one
UNION ALL
-- What a standby shows may be hours old: a kill switch that is over, or no executions where there were some.
SELECT idempotency.refuse('25006', 'policies are not read on a standby'), '', '', 0, NULL, NULL, -1, NULL, NULL, pg_catalog.statement_timestamp(), 0, true
WHERE pg_catalog.pg_is_in_recovery();

-- name: PolicyGet :one
SELECT p.enforcement, p.percentage, p.strategy, p.local_front, COALESCE((extract(epoch FROM p.wait) * 1000000)::bigint, -1)::bigint AS wait_us
FROM idempotency.policies AS p
WHERE p.scope = @scope AND p.name = @name;

-- name: PolicySet :exec
INSERT INTO idempotency.policies AS p (scope, name, enforcement, percentage, strategy, local_front, wait, actor, reason)
VALUES (@scope, @name, @enforcement, @percentage, sqlc.narg('strategy')::text, sqlc.narg('local_front')::boolean,
        sqlc.narg('wait_us')::bigint * interval '1 microsecond', @actor::text, @reason::text)
ON CONFLICT (scope, name) DO UPDATE
SET enforcement = EXCLUDED.enforcement, percentage = EXCLUDED.percentage, strategy = EXCLUDED.strategy,
    local_front = EXCLUDED.local_front, wait = EXCLUDED.wait, actor = EXCLUDED.actor, reason = EXCLUDED.reason;

-- name: PolicyBlame :exec
-- Who removes a policy and why, for the trigger that logs it: until the transaction ends. And the change must be on disk.
SELECT pg_catalog.set_config('idempotency.actor', @actor::text, true), pg_catalog.set_config('idempotency.reason', @reason::text, true),
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN pg_catalog.set_config('synchronous_commit', 'on', true) END;

-- name: PolicyLock :exec
-- One change at a time, so that what is read and what is written belong together. SHARE ROW EXCLUSIVE: readers go on.
LOCK TABLE idempotency.policies IN SHARE ROW EXCLUSIVE MODE;

-- name: PolicyDelete :execrows
DELETE FROM idempotency.policies AS p WHERE p.scope = @scope AND p.name = @name;

-- name: PolicyChangeList :many
SELECT c.id, c.scope, c.name, COALESCE(c.old_row::text, '')::text AS old_row, COALESCE(c.new_row::text, '')::text AS new_row,
       COALESCE(c.actor, '')::text AS actor, COALESCE(c.reason, '')::text AS reason, c.changed_by, c.changed_at
FROM idempotency.policy_changes AS c
ORDER BY c.id DESC
LIMIT @most::integer;
