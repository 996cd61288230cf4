-- +goose Up

-- Issued tokens: keys that a program hands out before they are used. Where an operation asks for one, a key that was never
-- issued, or too long ago, runs nothing.

-- +goose StatementBegin
CREATE FUNCTION idempotency.issue(tenant text, operation text, key text, life interval DEFAULT interval '24 hours') RETURNS timestamptz
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    asked_at constant timestamptz := pg_catalog.statement_timestamp();
BEGIN
    IF COALESCE(issue.life < interval '1 second', true) THEN
        RAISE EXCEPTION 'life of a token must be at least 1 s, is %', issue.life USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- No ON CONFLICT: a value that is there already, also as an expired record, is somebody else's. Fence 0: nobody has
    -- acquired it. A crash of the server may forget the row where commits do not wait for the disk; then the token is refused,
    -- and nothing was done with it.
    INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, expires_at)
    VALUES (issue.tenant, issue.operation, issue.key, 'INIT', 0, 0, 0, asked_at, asked_at + issue.life);
    RETURN asked_at + issue.life;
END
$$;

-- idempotency.acquire for an operation that runs for issued tokens only.
CREATE FUNCTION idempotency.acquire_issued(
    tenant text, operation text, key text, fingerprint bytea,
    attempt_token bytea DEFAULT NULL, lease interval DEFAULT interval '30 seconds', takeover text DEFAULT 'MANUAL',
    executor text DEFAULT NULL, client text DEFAULT NULL, trace_id text DEFAULT NULL,
    also bytea[] DEFAULT '{}', resolver boolean DEFAULT false
) RETURNS idempotency.acquisition
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    answer idempotency.acquisition;
    -- The lock that acquire takes too: whoever holds it gets it again. Without it somebody runs the key, and acquire says so,
    -- also when the token's time is over by now.
    locked constant boolean := pg_catalog.pg_try_advisory_xact_lock(
        idempotency.lock_id(acquire_issued.tenant, acquire_issued.operation, acquire_issued.key));
BEGIN
    -- A statement of its own: its snapshot must be younger than the lock. Both statements ask for the same time, so a token
    -- that is good here is good in acquire, also if the purge comes between them.
    IF locked AND NOT EXISTS (
        SELECT FROM idempotency.records AS r
        WHERE r.tenant = acquire_issued.tenant AND r.operation = acquire_issued.operation AND r.key = acquire_issued.key
          AND (r.state = 'PROCESSING' OR COALESCE(r.expires_at > pg_catalog.statement_timestamp(), true))
    ) THEN
        answer.verdict := 'NOT_ISSUED';
        RETURN answer;
    END IF;
    RETURN idempotency.acquire(acquire_issued.tenant, acquire_issued.operation, acquire_issued.key, acquire_issued.fingerprint,
        acquire_issued.attempt_token, acquire_issued.lease, acquire_issued.takeover, acquire_issued.executor,
        acquire_issued.client, acquire_issued.trace_id, acquire_issued.also, acquire_issued.resolver);
END
$$;

CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 5 $$;
-- +goose StatementEnd

-- Worker numbers of ids in the order of time. A process leases one instead of being configured with it. What keeps two
-- processes apart that had the same number one after the other is issued_until, and no clock: each makes ids only of the
-- milliseconds between what it found there and what it wrote there.
CREATE TABLE idempotency.workers (
    worker           smallint    NOT NULL,
    issued_until     timestamptz NOT NULL DEFAULT 'epoch',
    lease_token      bytea,
    executor         text        COLLATE "C",
    leased_at        timestamptz,
    lease_expires_at timestamptz,

    CONSTRAINT workers_pkey PRIMARY KEY (worker),
    CONSTRAINT workers_worker_check CHECK (worker BETWEEN 0 AND 1023),
    CONSTRAINT workers_lease_token_check CHECK (octet_length(lease_token) = 16),
    CONSTRAINT workers_lease_check CHECK (num_nulls(lease_token, executor, leased_at, lease_expires_at) IN (0, 4))
);

INSERT INTO idempotency.workers (worker) SELECT pg_catalog.generate_series(0, 1023);

COMMENT ON FUNCTION idempotency.issue(text, text, text, interval) IS
    'Issues a token: a key, new and hard to guess, that may be used once, for this tenant and operation. Returns until when its first use must come. Nobody who does not use it has to give it back.';
COMMENT ON FUNCTION idempotency.acquire_issued(text, text, text, bytea, bytea, interval, text, text, text, text, bytea[], boolean) IS
    'The same as idempotency.acquire, for issued tokens only. NOT_ISSUED: there is no such token for this tenant and operation, or its time is over. Nothing may be done.';

COMMENT ON TABLE idempotency.workers IS
    'Worker numbers of ids in the order of time, each of at most one process: SELECT * FROM idempotency.workers WHERE lease_token IS NOT NULL. There are 1024, which is what an id has room for.';
COMMENT ON COLUMN idempotency.workers.worker IS 'The number, 0 to 1023: a part of each id.';
COMMENT ON COLUMN idempotency.workers.issued_until IS
    'High-water mark: no id with this number is of a later millisecond. While leased, until when its owner may make ids. Never set it back.';
COMMENT ON COLUMN idempotency.workers.lease_token IS '16 random bytes of the process that has the number. NULL: nobody has it.';
COMMENT ON COLUMN idempotency.workers.executor IS 'Which process that is, host:pid:random. For people only.';
COMMENT ON COLUMN idempotency.workers.leased_at IS 'When it got the number.';
COMMENT ON COLUMN idempotency.workers.lease_expires_at IS
    'Until when it has it unless it renews. Another process gets the number a margin later.';

-- +goose Down

DROP TABLE idempotency.workers;
DROP FUNCTION idempotency.acquire_issued(text, text, text, bytea, bytea, interval, text, text, text, text, bytea[], boolean);
DROP FUNCTION idempotency.issue(text, text, text, interval);

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 4 $$;
-- +goose StatementEnd
