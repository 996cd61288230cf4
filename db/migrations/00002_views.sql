-- +goose Up

-- What people read: nothing here is needed by the library.

-- For people only: a result that is no JSON, or no valid UTF-8, must not break a look at the audit view. json, not jsonb:
-- what was stored is shown as it is, with \u0000, duplicate members, order and spelling of numbers. COST: with ORDER BY
-- and LIMIT it then runs only for the rows that are left. Not PARALLEL SAFE: up to PostgreSQL 16 a parallel plan refuses
-- an EXCEPTION clause.
-- +goose StatementBegin
CREATE FUNCTION idempotency.as_json(bytes bytea) RETURNS json
    LANGUAGE plpgsql STABLE STRICT COST 1000
    AS $$
BEGIN
    RETURN pg_catalog.convert_from(bytes, 'UTF8')::pg_catalog.json;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN -- too deeply nested is the latter
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- The derived states (TIMEOUT, EXPIRED) and the dropped result follow the same rules as the statements of the library.
CREATE VIEW idempotency.audit AS
SELECT r.tenant,
       r.operation,
       r.key,
       CASE WHEN r.state = 'PROCESSING' AND r.lease_expires_at <= statement_timestamp() THEN 'TIMEOUT'
            WHEN r.state <> 'PROCESSING' AND r.expires_at <= statement_timestamp() THEN 'EXPIRED'
            ELSE r.state END AS state,
       date_trunc('second', statement_timestamp() - r.created_at) AS age,
       COALESCE(r.completed_at, statement_timestamp()) - r.acquired_at AS duration,
       CASE WHEN r.result_type LIKE 'json%' AND COALESCE(r.result_expires_at > statement_timestamp(), true)
            THEN idempotency.as_json(r.result) END AS result,
       r.error_code || ': ' || r.error_message AS error,
       r.attempt,
       r.executor,
       r.client,
       r.trace_id,
       r.created_at,
       r.acquired_at,
       r.completed_at,
       r.lease_expires_at,
       r.expires_at,
       -- greatest alone would take NULL for 0.
       CASE WHEN r.state <> 'PROCESSING' AND r.expires_at IS NOT NULL
            THEN date_trunc('second', greatest(r.expires_at - statement_timestamp(), interval '0')) END AS retention_left,
       r.result_type,
       octet_length(r.result) AS result_bytes,
       -- Spelled out, so that partial indexes can serve both halves: records_result_expires_at_idx is one of them.
       r.result_type IS NOT NULL
           AND (r.result IS NULL
                OR r.result IS NOT NULL AND r.result_expires_at IS NOT NULL
                   AND r.result_expires_at <= statement_timestamp()) AS result_dropped,
       r.state AS stored_state,
       r.retryable,
       r.takeover,
       r.fence,
       r.generation
FROM idempotency.records AS r;

-- The predicate of records_stale_idx, written so that the index serves it.
CREATE VIEW idempotency.stale AS
SELECT r.tenant,
       r.operation,
       r.key,
       r.lease_expires_at AS stale_since,
       date_trunc('second', statement_timestamp() - r.lease_expires_at) AS stale_for,
       r.takeover,
       r.attempt,
       r.executor,
       r.client,
       r.trace_id,
       r.created_at,
       r.acquired_at,
       r.fence,
       r.generation
FROM idempotency.records AS r
WHERE r.state = 'PROCESSING' AND r.lease_expires_at <= statement_timestamp();

-- A day is a UTC day whatever the session's time zone, so that two people see the same numbers.
CREATE VIEW idempotency.daily AS
SELECT (r.created_at AT TIME ZONE 'UTC')::date AS day,
       r.tenant,
       r.operation,
       count(*) AS records,
       count(*) FILTER (WHERE r.state = 'SUCCESS') AS success,
       count(*) FILTER (WHERE r.state = 'FAILED') AS failed,
       count(*) FILTER (WHERE r.state = 'PROCESSING') AS processing,
       count(*) FILTER (WHERE r.state = 'INIT') AS issued,
       percentile_cont(0.50) WITHIN GROUP (ORDER BY r.completed_at - r.acquired_at) AS p50_duration,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.completed_at - r.acquired_at) AS p95_duration
FROM idempotency.records AS r
GROUP BY 1, 2, 3;

-- Everything about a key value alone, by the primary key. COLLATE: an argument with a collation of its own must not be a
-- conflict.
-- +goose StatementBegin
CREATE FUNCTION idempotency.find(key text) RETURNS SETOF idempotency.audit
    LANGUAGE sql STABLE ROWS 10
    AS $$
SELECT a.*
FROM idempotency.audit AS a
WHERE a.key = find.key COLLATE "C"
ORDER BY a.tenant, a.operation
$$;
-- +goose StatementEnd

-- What \d+ and \df+ in psql say.

COMMENT ON VIEW idempotency.audit IS
    'One readable line per record. Narrow it down by key, which the primary key serves, and by tenant and operation.';
COMMENT ON COLUMN idempotency.audit.tenant IS 'Whose key it is.';
COMMENT ON COLUMN idempotency.audit.operation IS 'What the key is for, for example order.create.';
COMMENT ON COLUMN idempotency.audit.key IS 'The client''s unique value.';
COMMENT ON COLUMN idempotency.audit.state IS
    'INIT, PROCESSING, SUCCESS, FAILED, or derived: TIMEOUT (PROCESSING past its lease), EXPIRED (counts as absent, not yet purged).';
COMMENT ON COLUMN idempotency.audit.age IS 'Since created_at, in whole seconds.';
COMMENT ON COLUMN idempotency.audit.duration IS
    'Of the latest attempt, from acquired_at to completed_at, or so far. NULL: INIT.';
COMMENT ON COLUMN idempotency.audit.result IS
    'The stored answer, if it is JSON. NULL: none, dropped (see result_dropped) or not JSON (see result_type, result_bytes).';
COMMENT ON COLUMN idempotency.audit.error IS 'Code and text of a failure. NULL: not FAILED.';
COMMENT ON COLUMN idempotency.audit.attempt IS 'Number of the latest attempt, from 1. 0: INIT.';
COMMENT ON COLUMN idempotency.audit.executor IS 'Who ran the latest attempt, host:pid:random.';
COMMENT ON COLUMN idempotency.audit.client IS 'Who called. NULL: not told.';
COMMENT ON COLUMN idempotency.audit.trace_id IS 'Trace of the latest attempt. NULL: not traced.';
COMMENT ON COLUMN idempotency.audit.created_at IS 'When this generation of the key began.';
COMMENT ON COLUMN idempotency.audit.acquired_at IS 'When the latest attempt began. NULL: INIT.';
COMMENT ON COLUMN idempotency.audit.completed_at IS 'When the outcome was written. NULL: none yet.';
COMMENT ON COLUMN idempotency.audit.lease_expires_at IS 'End of the lease. NULL: not PROCESSING.';
COMMENT ON COLUMN idempotency.audit.expires_at IS 'End of the retention. NULL: kept for ever.';
COMMENT ON COLUMN idempotency.audit.retention_left IS
    'Until expires_at, in whole seconds, 0 when past. NULL: kept for ever, or PROCESSING, which never expires.';
COMMENT ON COLUMN idempotency.audit.result_type IS 'Codec and version of the result. NULL: no result was ever stored.';
COMMENT ON COLUMN idempotency.audit.result_bytes IS 'Stored size of the result before compression. NULL: no bytes.';
COMMENT ON COLUMN idempotency.audit.result_dropped IS
    'True: a tombstone. The operation was done, its answer is gone; a retry gets "done, result gone" and runs nothing.';
COMMENT ON COLUMN idempotency.audit.stored_state IS 'The state as stored, without TIMEOUT and EXPIRED.';
COMMENT ON COLUMN idempotency.audit.retryable IS 'FAILED, and the next caller may try again.';
COMMENT ON COLUMN idempotency.audit.takeover IS
    'What may happen when the owner dies: RERUN, RESUME, RESOLVE, MANUAL. NULL: transactional mode.';
COMMENT ON COLUMN idempotency.audit.fence IS 'Number of the latest acquisition.';
COMMENT ON COLUMN idempotency.audit.generation IS 'The fence that began this life of the key.';

COMMENT ON VIEW idempotency.stale IS
    'PROCESSING records past their lease: the owner died or hangs. The compensator and the next caller act as takeover says; MANUAL waits for a person.';
COMMENT ON COLUMN idempotency.stale.tenant IS 'Whose key it is.';
COMMENT ON COLUMN idempotency.stale.operation IS 'What the key is for.';
COMMENT ON COLUMN idempotency.stale.key IS 'The client''s unique value.';
COMMENT ON COLUMN idempotency.stale.stale_since IS 'When the lease ended.';
COMMENT ON COLUMN idempotency.stale.stale_for IS 'Since then, in whole seconds.';
COMMENT ON COLUMN idempotency.stale.takeover IS
    'What may happen now: RERUN, RESUME (finished steps are not run again), RESOLVE (ask the other side first), MANUAL (a person decides).';
COMMENT ON COLUMN idempotency.stale.attempt IS 'Number of the attempt that went silent.';
COMMENT ON COLUMN idempotency.stale.executor IS 'Who ran it, host:pid:random.';
COMMENT ON COLUMN idempotency.stale.client IS 'Who called. NULL: not told.';
COMMENT ON COLUMN idempotency.stale.trace_id IS 'Its trace. NULL: not traced.';
COMMENT ON COLUMN idempotency.stale.created_at IS 'When this generation of the key began.';
COMMENT ON COLUMN idempotency.stale.acquired_at IS 'When the attempt began.';
COMMENT ON COLUMN idempotency.stale.fence IS 'Its fence.';
COMMENT ON COLUMN idempotency.stale.generation IS 'The fence that began this life of the key.';

COMMENT ON VIEW idempotency.daily IS
    'Counts per UTC day, tenant and operation over the records that are still stored. It reads the whole table.';
COMMENT ON COLUMN idempotency.daily.day IS 'UTC day of created_at.';
COMMENT ON COLUMN idempotency.daily.tenant IS 'Whose keys.';
COMMENT ON COLUMN idempotency.daily.operation IS 'What the keys are for.';
COMMENT ON COLUMN idempotency.daily.records IS 'All records: success + failed + processing + issued.';
COMMENT ON COLUMN idempotency.daily.success IS 'SUCCESS.';
COMMENT ON COLUMN idempotency.daily.failed IS 'FAILED, retryable ones too.';
COMMENT ON COLUMN idempotency.daily.processing IS 'PROCESSING, stale ones too.';
COMMENT ON COLUMN idempotency.daily.issued IS 'INIT: tokens nobody used.';
COMMENT ON COLUMN idempotency.daily.p50_duration IS
    'Median duration of the completed ones, from acquired_at to completed_at. NULL: none completed.';
COMMENT ON COLUMN idempotency.daily.p95_duration IS 'Their 95th percentile. NULL: none completed.';

COMMENT ON FUNCTION idempotency.as_json(bytea) IS 'The bytes as JSON, NULL if they are none. Never raises.';
COMMENT ON FUNCTION idempotency.find(text) IS
    'Every record with this key value, whoever''s it is and whatever it is for, as in the view idempotency.audit.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 2 $$;
-- +goose StatementEnd

-- +goose Down

-- One by one: a view of somebody else's that reads ours stops this with an error that names it.
DROP FUNCTION idempotency.find(text);
DROP VIEW idempotency.daily, idempotency.stale, idempotency.audit;
DROP FUNCTION idempotency.as_json(bytea);

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 1 $$;
-- +goose StatementEnd
