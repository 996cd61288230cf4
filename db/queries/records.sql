-- Every statement names tenant, operation and key, so that it also runs on sharded PostgreSQL, and computes nothing
-- volatile in DO UPDATE SET: what is volatile (fence, times) is computed in the inserted row and read from EXCLUDED.

-- name: RecordLock :one
-- The first statement of a transaction of ours. It never waits: a busy key is answered at once, with no fence.
SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock(@lock_id::bigint) THEN pg_catalog.nextval('idempotency.fence') END::bigint AS fence,
       -- The start of the transaction. Completion compares it, to see a function that ended the transaction by itself.
       pg_catalog.now()::timestamptz AS started,
       -- A function that hangs must not hold its key for ever. Settings are only made stricter.
       CASE WHEN pg_catalog.current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN '1 ms' AND '60 s'
            THEN pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true) END AS idle_timeout;

-- name: RecordLockTx :one
-- The same in a transaction of the caller, who owns its settings.
SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock(@lock_id::bigint) THEN pg_catalog.nextval('idempotency.fence') END::bigint AS fence,
       pg_catalog.now()::timestamptz AS started;

-- name: RecordGet :one
-- A statement of its own behind RecordLock: its snapshot must be younger than the lock.
SELECT state, fence, generation, attempt, retryable, fingerprint, attempt_token, takeover, executor, client, trace_id,
       created_at, acquired_at, completed_at, lease_expires_at, result_expires_at, expires_at,
       error_code, error_message, result_type,
       -- A result past its time counts as dropped, also before the purge has dropped it.
       CASE WHEN result_expires_at <= pg_catalog.statement_timestamp() THEN NULL ELSE result END::bytea AS result,
       -- PROCESSING never expires, whatever its age.
       (state <> 'PROCESSING' AND COALESCE(expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS expired,
       (state = 'PROCESSING' AND COALESCE(lease_expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS timed_out
FROM idempotency.records
WHERE tenant = @tenant AND operation = @operation AND key = @key;

-- name: RecordGetAttempt :one
-- Did one of these attempts commit? Expiry does not matter here: a record of ours is our outcome, however late we look.
SELECT state, fence, generation, attempt, retryable, fingerprint, attempt_token, takeover, executor, client, trace_id,
       created_at, acquired_at, completed_at, lease_expires_at, result_expires_at, expires_at,
       error_code, error_message, result_type, result,
       false AS expired, false AS timed_out
FROM idempotency.records
WHERE tenant = @tenant AND operation = @operation AND key = @key
  AND attempt_token = ANY (@attempt_tokens::bytea[])
  AND state IN ('SUCCESS', 'FAILED');

-- name: RecordsLock :many
-- RecordLock for many keys, in the order they are given. Two callers with the same keys in other orders do not wait for
-- one another: each gets what the other does not have.
SELECT k.lock_id::bigint AS lock_id,
       CASE WHEN pg_catalog.pg_try_advisory_xact_lock(k.lock_id) THEN pg_catalog.nextval('idempotency.fence') END::bigint AS fence,
       pg_catalog.now()::timestamptz AS started,
       CASE WHEN pg_catalog.current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN '1 ms' AND '60 s'
            THEN pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true) END AS idle_timeout
FROM (SELECT pg_catalog.unnest(@lock_ids::bigint[]) AS lock_id) AS k;

-- name: RecordsGet :many
-- RecordGet for many keys: a statement of its own behind RecordsLock, for the same reason. ordinal tells which of them.
SELECT k.ordinal::int AS ordinal, r.state, r.fence, r.generation, r.attempt, r.retryable, r.fingerprint, r.attempt_token, r.takeover,
       r.executor, r.client, r.trace_id, r.created_at, r.acquired_at, r.completed_at, r.lease_expires_at, r.result_expires_at,
       r.expires_at, r.error_code, r.error_message, r.result_type,
       CASE WHEN r.result_expires_at <= pg_catalog.statement_timestamp() THEN NULL ELSE r.result END::bytea AS result,
       (r.state <> 'PROCESSING' AND COALESCE(r.expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS expired,
       (r.state = 'PROCESSING' AND COALESCE(r.lease_expires_at <= pg_catalog.statement_timestamp(), false))::boolean AS timed_out
FROM (SELECT pg_catalog.unnest(@tenants::text[]) AS tenant, pg_catalog.unnest(@operations::text[]) AS operation,
             pg_catalog.unnest(@keys::text[]) AS key, pg_catalog.unnest(@ordinals::int[]) AS ordinal) AS k
JOIN idempotency.records AS r ON r.tenant = k.tenant AND r.operation = k.operation AND r.key = k.key;

-- name: RecordInsert :one
-- Completes a key of which nothing was found: the last statement before COMMIT, in the same flush. It must raise unless
-- it writes exactly one row, since nobody reads its answer before COMMIT is on its way.
INSERT INTO idempotency.records (
    tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
    result_expires_at, expires_at, fingerprint, attempt_token, executor, client, trace_id,
    error_code, error_message, result_type, result)
VALUES (@tenant, @operation, @key,
       -- Another transaction than the one that acquired: the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN pg_catalog.now() = @started::timestamptz THEN @state::text
            ELSE idempotency.refuse('ZP001', 'the transaction that acquired the key has ended') END,
       @fence::bigint, @fence::bigint, 1, @started::timestamptz, @started::timestamptz, pg_catalog.statement_timestamp(),
       pg_catalog.statement_timestamp() + sqlc.narg('result_retention_us')::bigint * interval '1 microsecond',
       pg_catalog.statement_timestamp() + sqlc.narg('retention_us')::bigint * interval '1 microsecond',
       @fingerprint::bytea, @attempt_token::bytea, @executor::text, sqlc.narg('client')::text, sqlc.narg('trace_id')::text,
       sqlc.narg('error_code')::text, sqlc.narg('error_message')::text, sqlc.narg('result_type')::text, sqlc.narg('result')::bytea)
RETURNING fence, completed_at,
          -- A commit that is acknowledged must be on disk, whatever the server or the function has set. In a transaction
          -- of the caller nothing is set.
          CASE WHEN @durable::boolean AND pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: RecordReplace :one
-- Completes a key over an EXPIRED or INIT record: a new generation. A statement of its own, since ON CONFLICT costs the
-- many inserts without one 6 % more WAL.
INSERT INTO idempotency.records AS r (
    tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
    result_expires_at, expires_at, fingerprint, attempt_token, executor, client, trace_id,
    error_code, error_message, result_type, result)
VALUES (@tenant, @operation, @key,
       CASE WHEN pg_catalog.now() = @started::timestamptz THEN @state::text
            ELSE idempotency.refuse('ZP001', 'the transaction that acquired the key has ended') END,
       @fence::bigint, @fence::bigint, 1, @started::timestamptz, @started::timestamptz, pg_catalog.statement_timestamp(),
       pg_catalog.statement_timestamp() + sqlc.narg('result_retention_us')::bigint * interval '1 microsecond',
       pg_catalog.statement_timestamp() + sqlc.narg('retention_us')::bigint * interval '1 microsecond',
       @fingerprint::bytea, @attempt_token::bytea, @executor::text, sqlc.narg('client')::text, sqlc.narg('trace_id')::text,
       sqlc.narg('error_code')::text, sqlc.narg('error_message')::text, sqlc.narg('result_type')::text, sqlc.narg('result')::bytea)
ON CONFLICT (tenant, operation, key) DO UPDATE SET
    -- Raised here and not left to a WHERE clause: zero rows would commit business rows without a record.
    state = CASE WHEN r.state = 'INIT' OR r.state <> 'PROCESSING' AND r.expires_at <= pg_catalog.statement_timestamp()
                 THEN EXCLUDED.state
                 ELSE idempotency.refuse('ZP002', 'another attempt has recorded an outcome of this key') END,
    -- A failover may have set the sequence back behind the old fence.
    fence             = greatest(EXCLUDED.fence, r.fence + 1),
    generation        = greatest(EXCLUDED.fence, r.fence + 1),
    attempt           = EXCLUDED.attempt,
    retryable         = EXCLUDED.retryable,
    created_at        = EXCLUDED.created_at,
    acquired_at       = EXCLUDED.acquired_at,
    completed_at      = EXCLUDED.completed_at,
    lease_expires_at  = EXCLUDED.lease_expires_at,
    result_expires_at = EXCLUDED.result_expires_at,
    expires_at        = EXCLUDED.expires_at,
    fingerprint       = EXCLUDED.fingerprint,
    attempt_token     = EXCLUDED.attempt_token,
    takeover          = EXCLUDED.takeover,
    executor          = EXCLUDED.executor,
    client            = EXCLUDED.client,
    trace_id          = EXCLUDED.trace_id,
    error_code        = EXCLUDED.error_code,
    error_message     = EXCLUDED.error_message,
    result_type       = EXCLUDED.result_type,
    result            = EXCLUDED.result
RETURNING fence, completed_at,
          CASE WHEN @durable::boolean AND pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: RecordIssue :one
-- An INIT record: a key handed out before it is used.
SELECT idempotency.issue(@tenant::text, @operation::text, @key::text, sqlc.arg('life_us')::bigint * interval '1 microsecond')::timestamptz AS expires_at;
