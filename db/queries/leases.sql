-- The leased mode is in the functions of the schema, see the migration: these only call them. idempotency.acquire is called
-- in package idempotency: sqlc does not know the columns of what a function returns.

-- name: LeaseRenew :one
SELECT idempotency.renew(@tenant::text, @operation::text, @key::text, @fence::bigint, @attempt_token::bytea,
    sqlc.arg('lease_us')::bigint * interval '1 microsecond') AS lease_expires_at;

-- name: LeaseLock :one
-- The first statement of the transaction that completes. Whoever is about to take the key over has the row: no waiting.
SELECT r.state, r.fence, r.attempt_token, pg_catalog.now()::timestamptz AS started
FROM idempotency.records AS r
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key
FOR UPDATE NOWAIT;

-- name: LeaseComplete :one
-- The last statement before COMMIT, in the same flush.
SELECT CASE WHEN pg_catalog.now() = @started::timestamptz
            THEN idempotency.complete(@tenant::text, @operation::text, @key::text, @fence::bigint, @attempt_token::bytea,
                     sqlc.narg('result')::bytea, @result_type::text,
                     sqlc.narg('retention_us')::bigint * interval '1 microsecond',
                     sqlc.narg('result_retention_us')::bigint * interval '1 microsecond')
            -- Another transaction than the one that locked the record: the function has sent COMMIT or ROLLBACK itself.
            ELSE idempotency.refuse('ZP001', 'the transaction that locked the record has ended')::timestamptz END AS completed_at,
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: LeaseFail :one
SELECT idempotency.fail(@tenant::text, @operation::text, @key::text, @fence::bigint, @attempt_token::bytea,
    @error_code::text, @error_message::text, @retryable::boolean, sqlc.narg('result')::bytea, sqlc.narg('result_type')::text,
    sqlc.narg('retention_us')::bigint * interval '1 microsecond',
    sqlc.narg('result_retention_us')::bigint * interval '1 microsecond') AS completed_at;

-- name: StepRecord :exec
SELECT idempotency.record_step(@tenant::text, @operation::text, @key::text, @fence::bigint, @attempt_token::bytea,
    @name::text, @result::bytea, @result_type::text);

-- name: StepsOf :many
SELECT name, fence, recorded_at, result_type, result
FROM idempotency.steps
WHERE tenant = @tenant AND operation = @operation AND key = @key AND generation = @generation
ORDER BY recorded_at, name;
