-- name: SchemaState :one
-- Is this a database we can work on?
SELECT idempotency.schema_version() AS version, pg_catalog.pg_is_in_recovery()::boolean AS in_recovery;

-- name: ProveReplicated :one
-- In the transaction of a read that looks for a lost commit: under synchronous replication an own commit that is
-- acknowledged proves that what it read was replicated before it.
SELECT CASE WHEN pg_catalog.current_setting('synchronous_standby_names') <> ''
            THEN pg_catalog.pg_logical_emit_message(true, 'pgonce', '')::text END AS lsn,
       -- With a weaker setting this commit would not wait either.
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: StaleList :many
-- A page of stale records, the longest dead first. Keyset paging: rows that nobody may touch must not be met again and again.
SELECT tenant, operation, key, fence, takeover, lease_expires_at
FROM idempotency.records
WHERE state = 'PROCESSING'
  AND lease_expires_at <= sqlc.arg('until')::timestamptz
  AND (lease_expires_at, key, tenant, operation) >
      (sqlc.arg('after_lease_expires_at')::timestamptz, sqlc.arg('after_key')::text, sqlc.arg('after_tenant')::text, sqlc.arg('after_operation')::text)
ORDER BY lease_expires_at, key, tenant, operation
LIMIT sqlc.arg('batch');

-- name: StaleRescue :one
SELECT idempotency.rescue(@tenant::text, @operation::text, @key::text, @fence::bigint, @actor::text, @reason::text,
    sqlc.narg('retention_us')::bigint * interval '1 microsecond')::boolean AS rescued;

-- name: AttemptInsertRescued :exec
-- The audit row of an outcome that a Resolver found, in the transaction that records it.
INSERT INTO idempotency.attempts (
    tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token, executor, trace_id,
    started_at, ended_at, error_code, error_message, actor, reason)
SELECT r.tenant, r.operation, r.key, 'RESCUED', r.state, r.generation, r.fence, r.attempt, r.attempt_token, r.executor,
       r.trace_id, r.acquired_at, r.completed_at, r.error_code, r.error_message, @actor::text, @reason::text
FROM idempotency.records AS r
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key AND r.attempt_token = @attempt_token;

-- name: ExpiredResultsList :many
SELECT tenant, operation, key, fence
FROM idempotency.records
WHERE result_expires_at <= pg_catalog.statement_timestamp() AND result_expires_at IS NOT NULL AND result IS NOT NULL
ORDER BY result_expires_at
LIMIT sqlc.arg('batch');

-- name: ResultsDrop :execrows
-- The predicate is asked again, and the fence: between the list and this a key may have begun a new life.
UPDATE idempotency.records AS r SET result = NULL
FROM (SELECT pg_catalog.unnest(@tenants::text[]) AS tenant, pg_catalog.unnest(@operations::text[]) AS operation,
             pg_catalog.unnest(@keys::text[]) AS key, pg_catalog.unnest(@fences::bigint[]) AS fence) AS c
WHERE r.tenant = c.tenant AND r.operation = c.operation AND r.key = c.key AND r.fence = c.fence
  AND r.result_expires_at <= pg_catalog.statement_timestamp();

-- name: ExpiredList :many
SELECT tenant, operation, key, fence
FROM idempotency.records
WHERE expires_at <= pg_catalog.statement_timestamp() AND state <> 'PROCESSING'
ORDER BY expires_at
LIMIT sqlc.arg('batch');

-- name: ExpiredDelete :one
-- Records, and what belongs to them.
WITH gone AS (
    DELETE FROM idempotency.records AS r
    USING (SELECT pg_catalog.unnest(@tenants::text[]) AS tenant, pg_catalog.unnest(@operations::text[]) AS operation,
             pg_catalog.unnest(@keys::text[]) AS key, pg_catalog.unnest(@fences::bigint[]) AS fence) AS c
    WHERE r.tenant = c.tenant AND r.operation = c.operation AND r.key = c.key AND r.fence = c.fence
      AND r.expires_at <= pg_catalog.statement_timestamp() AND r.state <> 'PROCESSING'
    RETURNING r.tenant, r.operation, r.key
), steps_gone AS (
    DELETE FROM idempotency.steps AS s USING gone
    WHERE s.tenant = gone.tenant AND s.operation = gone.operation AND s.key = gone.key
), attempts_gone AS (
    DELETE FROM idempotency.attempts AS a USING gone
    WHERE a.tenant = gone.tenant AND a.operation = gone.operation AND a.key = gone.key
)
SELECT count(*) FROM gone;

-- name: ExpiredDeleteHere :one
-- The same where the table is in one place: by the place of each row, which costs a third. A row that has begun a new life
-- meanwhile is in another place, and the predicate is asked again of what was locked by somebody else.
WITH gone AS (
    DELETE FROM idempotency.records AS r
    WHERE r.ctid = ANY (ARRAY(
            SELECT x.ctid FROM idempotency.records AS x
            WHERE x.expires_at <= pg_catalog.statement_timestamp() AND x.state <> 'PROCESSING'
            ORDER BY x.expires_at
            LIMIT sqlc.arg('batch')))
      AND r.expires_at <= pg_catalog.statement_timestamp() AND r.state <> 'PROCESSING'
    RETURNING r.tenant, r.operation, r.key
), steps_gone AS (
    DELETE FROM idempotency.steps AS s USING gone
    WHERE s.tenant = gone.tenant AND s.operation = gone.operation AND s.key = gone.key
), attempts_gone AS (
    DELETE FROM idempotency.attempts AS a USING gone
    WHERE a.tenant = gone.tenant AND a.operation = gone.operation AND a.key = gone.key
)
SELECT count(*) FROM gone;

-- name: ExpiredDeleteFree :one
-- The same without the rows that somebody has locked: nobody waits, one row holds up nothing, and replicas take different ones.
-- The locks make it a third dearer, so it is for what the other one has left.
WITH gone AS (
    DELETE FROM idempotency.records AS r
    WHERE r.ctid = ANY (ARRAY(
            SELECT x.ctid FROM idempotency.records AS x
            WHERE x.expires_at <= pg_catalog.statement_timestamp() AND x.state <> 'PROCESSING'
            ORDER BY x.expires_at
            LIMIT sqlc.arg('batch')
            FOR UPDATE SKIP LOCKED))
      AND r.expires_at <= pg_catalog.statement_timestamp() AND r.state <> 'PROCESSING'
    RETURNING r.tenant, r.operation, r.key
), steps_gone AS (
    DELETE FROM idempotency.steps AS s USING gone
    WHERE s.tenant = gone.tenant AND s.operation = gone.operation AND s.key = gone.key
), attempts_gone AS (
    DELETE FROM idempotency.attempts AS a USING gone
    WHERE a.tenant = gone.tenant AND a.operation = gone.operation AND a.key = gone.key
)
SELECT count(*) FROM gone;

-- name: Sharded :one
-- Whether rows may be in several places, each with rows of the same place.
SELECT (EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname = 'citus')
    OR EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = 'idempotency.records'::regclass AND c.relkind = 'p'))::boolean AS sharded;

-- name: MaintenanceCount :one
-- What a pass would find, for a dry run.
SELECT (SELECT count(*) FROM idempotency.records WHERE result_expires_at <= pg_catalog.statement_timestamp()
            AND result_expires_at IS NOT NULL AND result IS NOT NULL) AS results,
       (SELECT count(*) FROM idempotency.records WHERE expires_at <= pg_catalog.statement_timestamp()
            AND state <> 'PROCESSING') AS records;
