-- name: BypassInsert :one
-- An execution without a record: the last statement before COMMIT, in the same flush, in the place of RecordInsert and with its
-- columns. It must raise unless it writes exactly one row.
INSERT INTO idempotency.bypasses (
    tenant, operation, key, attempt_token, fingerprint, enforcement, would_be, outcome, error_code, executor, client, trace_id,
    policy_change, began_at, bypassed_at, expires_at)
VALUES (@tenant, @operation, @key, @attempt_token::bytea, @fingerprint::bytea, @enforcement::text, @would_be::text,
       -- Another transaction than the one that acquired: the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN pg_catalog.now() = @started::timestamptz THEN @outcome::text
            ELSE idempotency.refuse('ZP001', 'the transaction that acquired the key has ended') END,
       sqlc.narg('error_code')::text, @executor::text, sqlc.narg('client')::text, sqlc.narg('trace_id')::text,
       @policy_change::bigint, @started::timestamptz, pg_catalog.statement_timestamp(),
       pg_catalog.statement_timestamp() + sqlc.narg('retention_us')::bigint * interval '1 microsecond')
RETURNING 0::bigint AS fence, bypassed_at AS completed_at,
          CASE WHEN @durable::boolean AND pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: BypassGetAttempt :one
-- Did one of these attempts commit without a record?
SELECT attempt_token, outcome, COALESCE(error_code, '')::text AS error_code, began_at, bypassed_at
FROM idempotency.bypasses
WHERE tenant = @tenant AND operation = @operation AND key = @key AND attempt_token = ANY (@attempt_tokens::bytea[])
ORDER BY bypassed_at DESC
LIMIT 1;

-- name: BypassOpen :one
-- Was this key executed without a record, so that it must not be again? As long as its record would have been kept.
SELECT b.fingerprint, b.outcome, b.bypassed_at
FROM idempotency.bypasses AS b
WHERE b.tenant = @tenant AND b.operation = @operation AND b.key = @key
  AND (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED' AND b.resolution IS DISTINCT FROM 'RERUN'
  AND COALESCE(b.expires_at > pg_catalog.statement_timestamp(), true)
ORDER BY b.bypassed_at DESC
LIMIT 1;

-- name: ShadowReport :many
-- What enforce would have done, by operation. The time is served by the index in the order of insertion.
SELECT b.operation::text AS operation, b.would_be, count(*) AS calls, count(DISTINCT (b.key::text, b.tenant::text)) AS keys,
       min(b.bypassed_at)::timestamptz AS first_at, max(b.bypassed_at)::timestamptz AS last_at,
       max(b.key)::text AS example_key, COALESCE(max(b.trace_id), '')::text AS example_trace
FROM idempotency.bypasses AS b
WHERE b.enforcement = 'shadow' AND b.bypassed_at > pg_catalog.statement_timestamp() - sqlc.arg('since_us')::bigint * interval '1 microsecond'
  AND (@operation::text = '' OR b.operation = @operation)
GROUP BY b.operation, b.would_be
ORDER BY b.operation, b.would_be;

-- name: ReusedKeys :many
-- Keys with records of several operations of one tenant, in the order of the primary key, which serves this from its index
-- alone and stops at the limit.
SELECT r.key::text AS key, r.tenant::text AS tenant, pg_catalog.array_agg(r.operation::text ORDER BY r.operation)::text[] AS operations
FROM idempotency.records AS r
WHERE (r.key, r.tenant) > (@after_key::text, @after_tenant::text)
GROUP BY r.key, r.tenant
HAVING count(*) > 1
ORDER BY r.key, r.tenant
LIMIT @rows::integer;

-- name: BypassedList :many
-- What the kill switch has let through, a line for each key, in the order of operation, key and tenant.
SELECT b.operation::text AS operation, b.key::text AS key, b.tenant::text AS tenant, count(*) AS executions,
       count(DISTINCT b.fingerprint::bytea) AS payloads, min(b.bypassed_at)::timestamptz AS first_at, max(b.bypassed_at)::timestamptz AS last_at,
       COALESCE((SELECT r.state FROM idempotency.records AS r
                 WHERE r.tenant = b.tenant AND r.operation = b.operation AND r.key = b.key)::text, '')::text AS record,
       pg_catalog.bool_or(b.resolution IS NULL)::boolean AS unreconciled,
       COALESCE(max(b.resolution), '')::text AS resolution,
       max(b.outcome)::text AS outcome, COALESCE(max(b.trace_id), '')::text AS example_trace,
       COALESCE(max(b.policy_change), 0)::bigint AS policy_change
FROM idempotency.bypasses AS b
WHERE (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED' AND b.resolution IS DISTINCT FROM 'RERUN'
  AND (@reconciled::boolean OR b.resolution IS NULL)
  AND (@only_operation::text = '' OR b.operation = @only_operation)
  AND (b.operation, b.key, b.tenant) > (@after_operation::text, @after_key::text, @after_tenant::text)
GROUP BY b.operation, b.key, b.tenant
HAVING NOT @duplicates::boolean OR count(*) > 1
    OR EXISTS (SELECT FROM idempotency.records AS r WHERE r.tenant = b.tenant AND r.operation = b.operation AND r.key = b.key
                 AND r.state = 'SUCCESS')
ORDER BY b.operation, b.key, b.tenant
LIMIT @rows::integer;

-- name: BypassCount :one
-- For a look at the whole: how many executions nobody has reconciled. Counted up to a limit.
SELECT count(*) FROM (
    SELECT FROM idempotency.bypasses AS b
    WHERE (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED' AND b.resolution IS DISTINCT FROM 'RERUN'
      AND b.resolution IS NULL
    LIMIT @most::integer) AS open;

-- name: BypassReconcile :execrows
-- Only what the kill switch, or a call beside a running one, has let through. What was decided before may be decided anew;
-- the audit row of every decision is in idempotency.attempts.
UPDATE idempotency.bypasses AS b
SET resolution = @resolution::text, reconciled_at = pg_catalog.statement_timestamp(), reconciled_by = @actor::text,
    reconcile_reason = @reason::text
WHERE b.tenant = @tenant AND b.operation = @operation AND b.key = @key
  AND (b.enforcement = 'off' OR b.would_be = 'IN_PROGRESS') AND b.outcome <> 'FAILED'
  AND b.resolution IS DISTINCT FROM @resolution::text;

-- name: BypassReconcileAttempt :exec
-- Who decided, and why: one row for each execution that the same transaction has reconciled.
INSERT INTO idempotency.attempts (
    tenant, operation, key, event, generation, fence, attempt, attempt_token, executor, trace_id, started_at, ended_at,
    error_message, actor, reason)
SELECT b.tenant, b.operation, b.key, 'OPERATOR', 0, 0, 0, b.attempt_token, b.executor, b.trace_id, b.began_at, b.bypassed_at,
       'execution without a record reconciled as ' || b.resolution, @actor::text, @reason::text
FROM idempotency.bypasses AS b
WHERE b.tenant = @tenant AND b.operation = @operation AND b.key = @key AND b.reconciled_at >= pg_catalog.now()
ORDER BY b.bypassed_at;

-- name: BypassPurgeList :many
-- What nobody asks about any more. What the kill switch has let through stays until somebody has reconciled it, and where it is
-- done as long as a late call of the key would do it again.
SELECT b.tenant, b.operation, b.key, b.attempt_token
FROM idempotency.bypasses AS b
WHERE b.bypassed_at <= pg_catalog.statement_timestamp() - sqlc.arg('age_us')::bigint * interval '1 microsecond'
  AND (b.enforcement = 'shadow' AND b.would_be <> 'IN_PROGRESS' OR b.outcome = 'FAILED' OR b.resolution = 'RERUN'
       OR b.resolution = 'DONE' AND b.expires_at <= pg_catalog.statement_timestamp())
LIMIT sqlc.arg('batch');

-- name: BypassPurgeCount :one
SELECT count(*)
FROM idempotency.bypasses AS b
WHERE b.bypassed_at <= pg_catalog.statement_timestamp() - sqlc.arg('age_us')::bigint * interval '1 microsecond'
  AND (b.enforcement = 'shadow' AND b.would_be <> 'IN_PROGRESS' OR b.outcome = 'FAILED' OR b.resolution = 'RERUN'
       OR b.resolution = 'DONE' AND b.expires_at <= pg_catalog.statement_timestamp());

-- name: BypassDelete :execrows
-- The predicate is asked again: a decision may have been taken back meanwhile.
DELETE FROM idempotency.bypasses AS b
USING (SELECT pg_catalog.unnest(@tenants::text[]) AS tenant, pg_catalog.unnest(@operations::text[]) AS operation,
             pg_catalog.unnest(@keys::text[]) AS key, pg_catalog.unnest(@tokens::bytea[]) AS attempt_token) AS c
WHERE b.tenant = c.tenant AND b.operation = c.operation AND b.key = c.key AND b.attempt_token = c.attempt_token
  AND (b.enforcement = 'shadow' AND b.would_be <> 'IN_PROGRESS' OR b.outcome = 'FAILED' OR b.resolution = 'RERUN'
       OR b.resolution = 'DONE' AND b.expires_at <= pg_catalog.statement_timestamp());
