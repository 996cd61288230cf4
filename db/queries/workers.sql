-- Worker numbers. They are not on the path of a request: one statement when a process begins, and one for each renewal.

-- name: WorkerLease :one
-- Locked rows are skipped: processes that begin together get different numbers at once. MATERIALIZED: inside a join the row
-- could be chosen more than once.
WITH free AS MATERIALIZED (
    SELECT f.worker, f.issued_until
    FROM idempotency.workers AS f
    WHERE f.lease_token IS NULL
       OR f.lease_expires_at <= pg_catalog.statement_timestamp() - sqlc.arg('margin_us')::bigint * interval '1 microsecond'
    -- Those first whose mark no clock has to catch up with. Else at random: a lease that a failover has forgotten is most likely
    -- not given away again while its owner still believes in it.
    ORDER BY GREATEST(f.issued_until, pg_catalog.statement_timestamp()), pg_catalog.random()
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.workers AS w
SET lease_token = @lease_token::bytea, executor = @executor::text, leased_at = pg_catalog.statement_timestamp(),
    lease_expires_at = pg_catalog.statement_timestamp() + sqlc.arg('lease_us')::bigint * interval '1 microsecond',
    -- Before the first id is made, not after the last: a process that dies writes nothing any more.
    issued_until = GREATEST(free.issued_until, pg_catalog.statement_timestamp()) + sqlc.arg('lease_us')::bigint * interval '1 microsecond'
FROM free
WHERE w.worker = free.worker
RETURNING w.worker, free.issued_until::timestamptz AS issued_before, w.issued_until::timestamptz AS issued_until,
          w.lease_expires_at::timestamptz AS lease_expires_at, pg_catalog.statement_timestamp()::timestamptz AS now,
          -- Forgotten by a crash, the number could be given away again.
          CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: WorkerRenew :one
-- Also after the lease's end, as long as nobody else has the number; and neither time ever goes back.
UPDATE idempotency.workers AS w
SET lease_expires_at = GREATEST(w.lease_expires_at, pg_catalog.statement_timestamp() + sqlc.arg('lease_us')::bigint * interval '1 microsecond'),
    issued_until = GREATEST(w.issued_until, pg_catalog.statement_timestamp() + sqlc.arg('lease_us')::bigint * interval '1 microsecond')
WHERE w.worker = @worker::smallint AND w.lease_token = @lease_token::bytea
RETURNING w.issued_until::timestamptz AS issued_until, w.lease_expires_at::timestamptz AS lease_expires_at,
          pg_catalog.statement_timestamp()::timestamptz AS now,
          CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS synchronous_commit;

-- name: WorkerRelease :execrows
-- The owner knows what it has made: whoever is next need not wait for the rest of it. Set back by its owner only, and never
-- before what it has made.
UPDATE idempotency.workers AS w
SET lease_token = NULL, executor = NULL, leased_at = NULL, lease_expires_at = NULL,
    issued_until = LEAST(w.issued_until, sqlc.arg('issued_until')::timestamptz)
WHERE w.worker = @worker::smallint AND w.lease_token = @lease_token::bytea;
