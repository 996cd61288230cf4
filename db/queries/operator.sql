-- What a person asks and changes. The reads go by the view idempotency.audit, so that they say what the guide's SQL says.

-- name: AuditByKey :many
-- By the primary key, which begins with the key. An empty tenant or operation is any.
SELECT a.tenant, a.operation, a.key, a.state::text AS state, a.attempt, COALESCE(a.executor, '')::text AS executor,
       COALESCE(a.client, '')::text AS client, COALESCE(a.trace_id, '')::text AS trace_id, a.created_at, a.acquired_at,
       a.completed_at, a.lease_expires_at, a.expires_at, COALESCE(a.error, '')::text AS error,
       COALESCE(a.result_type, '')::text AS result_type, COALESCE(a.result::text, '')::text AS result,
       COALESCE(a.result_bytes, 0)::bigint AS result_bytes, a.result_dropped::boolean AS result_dropped, a.retryable,
       COALESCE(a.takeover, '')::text AS takeover, a.fence, a.generation,
       pg_catalog.statement_timestamp()::timestamptz AS read_at
FROM idempotency.audit AS a
WHERE a.key = @key AND (@tenant::text = '' OR a.tenant = @tenant) AND (@operation::text = '' OR a.operation = @operation)
ORDER BY a.tenant, a.operation
LIMIT @rows::integer;

-- name: KeyHolders :many
-- Whose transaction holds the key's lock right now. A lock of 64 bits is in two halves there.
SELECT a.pid::integer AS pid, COALESCE(a.application_name, '')::text AS application_name,
       COALESCE(pg_catalog.host(a.client_addr), '')::text AS client_addr, COALESCE(a.usename::text, '')::text AS username,
       COALESCE(a.state, '')::text AS state, a.xact_start, a.state_change,
       pg_catalog.statement_timestamp()::timestamptz AS read_at
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = @lock_id::bigint;

-- name: AttemptsOf :many
SELECT a.tenant, a.operation, a.key, a.id, a.event, COALESCE(a.outcome, '')::text AS outcome, a.generation, a.fence, a.attempt,
       COALESCE(a.executor, '')::text AS executor, COALESCE(a.trace_id, '')::text AS trace_id, a.started_at, a.ended_at,
       COALESCE(a.error_code, '')::text AS error_code, COALESCE(a.error_message, '')::text AS error_message,
       COALESCE(a.actor, '')::text AS actor, COALESCE(a.reason, '')::text AS reason, a.recorded_at
FROM idempotency.attempts AS a
WHERE a.key = @key AND (@tenant::text = '' OR a.tenant = @tenant) AND (@operation::text = '' OR a.operation = @operation)
ORDER BY a.tenant, a.operation, a.id
LIMIT @rows::integer;

-- name: OperatorLock :one
-- The first statement of the transaction that changes a record: the lock that every writer who changes the owner takes. An
-- acknowledged change must be on disk.
SELECT COALESCE(CASE WHEN pg_catalog.pg_try_advisory_xact_lock(@lock_id::bigint)
                     THEN pg_catalog.nextval('idempotency.fence') END, 0)::bigint AS fence, -- 0: somebody has it
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: OperatorRow :one
-- A statement of its own: its snapshot must be younger than the lock. NOWAIT: an owner that is completing has the row.
SELECT r.state, r.fence, r.retryable, COALESCE(r.takeover, '')::text AS takeover, r.lease_expires_at, r.expires_at,
       (r.state = 'PROCESSING' AND COALESCE(r.lease_expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS timed_out,
       (r.state <> 'PROCESSING' AND COALESCE(r.expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS expired
FROM idempotency.records AS r
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key
FOR UPDATE NOWAIT;

-- name: OperatorAttempt :exec
-- Who changed the record and why, with the attempt that it was changed under. Before the change.
INSERT INTO idempotency.attempts (
    tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token, executor, trace_id,
    started_at, ended_at, error_code, error_message, actor, reason)
SELECT r.tenant, r.operation, r.key, 'OPERATOR', sqlc.narg('outcome')::text, r.generation, r.fence, r.attempt, r.attempt_token,
       r.executor, r.trace_id, r.acquired_at, COALESCE(r.completed_at, pg_catalog.statement_timestamp()),
       sqlc.narg('error_code')::text, sqlc.narg('error_message')::text, @actor::text, @reason::text
FROM idempotency.records AS r
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key;

-- name: OperatorAttemptsEnd :execrows
-- The earlier attempts of this life that nobody knows the end of. Whoever fails the record has found out: without an end of
-- theirs a record with the rule RESOLVE or MANUAL could not be run again, retryable or not.
INSERT INTO idempotency.attempts (
    tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token, executor, trace_id,
    started_at, ended_at, error_code, error_message, actor, reason)
SELECT a.tenant, a.operation, a.key, 'OPERATOR', 'FAILED', a.generation, a.fence, a.attempt, a.attempt_token, a.executor,
       a.trace_id, a.started_at, pg_catalog.statement_timestamp(), @error_code::text, @error_message::text, @actor::text,
       @reason::text
FROM idempotency.attempts AS a
JOIN idempotency.records AS r ON r.tenant = a.tenant AND r.operation = a.operation AND r.key = a.key
    AND r.generation = a.generation
WHERE a.tenant = @tenant AND a.operation = @operation AND a.key = @key AND a.event IN ('ACQUIRED', 'TAKEOVER')
  AND NOT EXISTS (
    SELECT FROM idempotency.attempts AS e
    WHERE e.tenant = a.tenant AND e.operation = a.operation AND e.key = a.key AND e.fence = a.fence AND e.ended_at IS NOT NULL
      AND e.event <> 'LEASE_LOST') -- then its ownership ended; what it did is not known
ORDER BY a.id;

-- name: OperatorFail :one
-- State and fence are those that were read under the row's lock, and repeated here. The fence grows: whatever the old owner
-- still sends finds another one.
UPDATE idempotency.records AS r
SET state = 'FAILED', retryable = @retryable::boolean, fence = GREATEST(@next_fence::bigint, r.fence + 1),
    completed_at = pg_catalog.statement_timestamp(), lease_expires_at = NULL,
    expires_at = pg_catalog.statement_timestamp() + sqlc.narg('retention_us')::bigint * interval '1 microsecond',
    error_code = @error_code::text, error_message = @error_message::text
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key AND r.state = 'PROCESSING' AND r.fence = @fence
  AND (@force::boolean OR r.lease_expires_at <= pg_catalog.statement_timestamp())
RETURNING r.fence;

-- name: OperatorExpire :one
-- Never PROCESSING: that would be a second execution beside the first.
UPDATE idempotency.records AS r
SET expires_at = LEAST(r.expires_at, pg_catalog.statement_timestamp()), fence = GREATEST(@next_fence::bigint, r.fence + 1)
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key AND r.state <> 'PROCESSING' AND r.fence = @fence
RETURNING r.fence;

-- name: AuditList :many
-- One page, in the order of the primary key. The comparison of stored states is there for the indexes' sake: with constants
-- in the place of the parameters (never prepared by name) the partial index of running records serves it. after_key is empty
-- on the first page.
SELECT a.tenant, a.operation, a.key, a.state::text AS state, a.attempt, COALESCE(a.executor, '')::text AS executor,
       a.created_at, COALESCE(a.error, '')::text AS error, COALESCE(a.takeover, '')::text AS takeover, a.retryable,
       pg_catalog.statement_timestamp()::timestamptz AS read_at
FROM idempotency.audit AS a
WHERE (@state::text = '' OR a.state = @state)
  AND (@stored_state::text = '' OR a.stored_state = @stored_state)
  AND (NOT @expired::boolean OR a.expires_at <= pg_catalog.statement_timestamp())
  AND (@tenant::text = '' OR a.tenant = @tenant)
  AND (@operation::text = '' OR a.operation = @operation)
  AND (sqlc.narg('older_us')::bigint IS NULL
       OR a.created_at <= pg_catalog.statement_timestamp() - sqlc.narg('older_us')::bigint * interval '1 microsecond')
  AND (sqlc.narg('younger_us')::bigint IS NULL
       OR a.created_at >= pg_catalog.statement_timestamp() - sqlc.narg('younger_us')::bigint * interval '1 microsecond')
  AND (@after_key::text = '' OR (a.key, a.tenant, a.operation) > (@after_key, @after_tenant::text, @after_operation::text))
ORDER BY a.key, a.tenant, a.operation
LIMIT @rows::integer;
