-- +goose Up

-- The leased mode, for functions that call somebody else: the record is committed as PROCESSING before the call and
-- completed after it. The four functions below are the whole of it; the library and programs in other languages call the
-- same ones, so that there is one place that says who may own a key. search_path is set: an operator of the caller's must not
-- decide it.

-- Outcomes of single steps of a leased operation. They belong to one life of the key: an attempt that takes over finds the
-- finished ones, a key used again after its retention finds none.
CREATE TABLE idempotency.steps (
    tenant      idempotency.tenant_name    NOT NULL,
    operation   idempotency.operation_name NOT NULL,
    key         idempotency.key_value      NOT NULL,
    generation  bigint      NOT NULL,
    name        text        COLLATE "C" NOT NULL,
    fence       bigint      NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    result_type text        COLLATE "C" NOT NULL,
    result      bytea       NOT NULL,

    CONSTRAINT steps_pkey PRIMARY KEY (key, tenant, operation, generation, name),
    CONSTRAINT steps_name_check CHECK (octet_length(name) BETWEEN 1 AND 255)
);

CREATE TYPE idempotency.acquisition AS (
    verdict           text,
    state             text,
    fence             bigint,
    generation        bigint,
    attempt           integer,
    retryable         boolean,
    fingerprint       bytea,
    attempt_token     bytea,
    takeover          text,
    executor          text,
    client            text,
    trace_id          text,
    created_at        timestamptz,
    acquired_at       timestamptz,
    completed_at      timestamptz,
    lease_expires_at  timestamptz,
    result_expires_at timestamptz,
    expires_at        timestamptz,
    error_code        text,
    error_message     text,
    result_type       text,
    result            bytea,
    expired           boolean,
    timed_out         boolean
);

-- The library's fingerprint of a payload's bytes. Not named as its domain is: with a plain literal that would be a cast.
-- +goose StatementBegin
CREATE FUNCTION idempotency.fingerprint_of(payload bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT '\x01'::bytea || pg_catalog.sha256('\x01'::bytea || pg_catalog.int8send(pg_catalog.octet_length(payload)::bigint) || payload)
$$;

-- What a call to somebody else presents as its idempotency key. The Go twin is Record.DownstreamKey; both must give the same,
-- since an attempt of the one may repeat the call of the other. 24 bytes: no padding, and longer than anybody can guess.
CREATE FUNCTION idempotency.downstream_key(tenant text, operation text, key text, generation bigint, name text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT pg_catalog.translate(pg_catalog.encode(pg_catalog.substring(pg_catalog.sha256(
        pg_catalog.int8send(pg_catalog.octet_length(tenant)::bigint)    || pg_catalog.convert_to(tenant, 'UTF8')
     || pg_catalog.int8send(pg_catalog.octet_length(operation)::bigint) || pg_catalog.convert_to(operation, 'UTF8')
     || pg_catalog.int8send(pg_catalog.octet_length(key)::bigint)       || pg_catalog.convert_to(key, 'UTF8')
     || pg_catalog.int8send(pg_catalog.octet_length(name)::bigint)      || pg_catalog.convert_to(name, 'UTF8')
     || pg_catalog.int8send(generation)
    ), 1, 24), 'base64'), '+/', '-_')
$$;

-- A commit that is acknowledged must be on disk, whatever the server has set: somebody is called because of it. Only ever made
-- stricter.
CREATE FUNCTION idempotency.durable() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
END
$$;

-- An owner whose key is about to go to somebody else. Only its ownership ends here: what it did elsewhere nobody knows, and the
-- rules RESOLVE and MANUAL ask until somebody says so.
CREATE FUNCTION idempotency.record_lost(record idempotency.records, actor text, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
    AS $$
INSERT INTO idempotency.attempts (tenant, operation, key, event, generation, fence, attempt, attempt_token, executor, trace_id,
    started_at, ended_at, actor, reason)
VALUES (record.tenant, record.operation, record.key, 'LEASE_LOST', record.generation, record.fence, record.attempt,
    record.attempt_token, record.executor, record.trace_id, record.acquired_at, pg_catalog.statement_timestamp(), actor, reason)
$$;

CREATE FUNCTION idempotency.acquire(
    tenant text, operation text, key text, fingerprint bytea,
    attempt_token bytea DEFAULT NULL, lease interval DEFAULT interval '30 seconds', takeover text DEFAULT 'MANUAL',
    executor text DEFAULT NULL, client text DEFAULT NULL, trace_id text DEFAULT NULL,
    also bytea[] DEFAULT '{}', resolver boolean DEFAULT false
) RETURNS idempotency.acquisition
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    -- A little in the past after a wait: a lease then ends late and is taken over late, never early.
    asked_at constant timestamptz := pg_catalog.statement_timestamp();
    token    constant bytea := COALESCE(acquire.attempt_token, pg_catalog.uuid_send(pg_catalog.gen_random_uuid()));
    runner   constant text := COALESCE(acquire.executor,
        pg_catalog.concat(pg_catalog.host(pg_catalog.inet_client_addr()), ':', pg_catalog.pg_backend_pid(), ':sql'));
    r        idempotency.records;
    locked   boolean;
    expired  boolean;
    stale    boolean;
    begins   boolean; -- a new life of the key
    verdict  text;
    next     bigint;
BEGIN
    IF acquire.lease < interval '1 second' THEN
        RAISE EXCEPTION 'lease must be at least 1 s, is %', acquire.lease USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A comparison with NULL is neither true nor false, and any payload would have the answer.
    IF acquire.tenant IS NULL OR acquire.operation IS NULL OR acquire.key IS NULL OR acquire.lease IS NULL
            OR COALESCE(pg_catalog.octet_length(acquire.fingerprint) <> 33, true)
            OR acquire.also IS NULL OR pg_catalog.array_position(acquire.also, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'tenant, operation, key, lease and fingerprint (see idempotency.fingerprint_of) must not be NULL, nor anything in also'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    locked := pg_catalog.pg_try_advisory_xact_lock(idempotency.lock_id(acquire.tenant, acquire.operation, acquire.key));
    -- A statement of its own: its snapshot must be younger than the lock.
    IF locked THEN
        BEGIN
            SELECT * INTO r FROM idempotency.records AS x
            WHERE x.tenant = acquire.tenant AND x.operation = acquire.operation AND x.key = acquire.key
            FOR UPDATE NOWAIT;
        EXCEPTION WHEN lock_not_available THEN
            locked := false; -- somebody writes it right now
        END;
    END IF;
    IF NOT locked THEN
        SELECT * INTO r FROM idempotency.records AS x
        WHERE x.tenant = acquire.tenant AND x.operation = acquire.operation AND x.key = acquire.key;
    END IF;

    expired := r.state IS NOT NULL AND r.state <> 'PROCESSING' AND COALESCE(r.expires_at <= asked_at, false);
    stale := r.state = 'PROCESSING' AND r.lease_expires_at <= asked_at;
    begins := r.state IS NULL OR r.state = 'INIT' OR expired;
    verdict := CASE
        WHEN begins THEN CASE WHEN locked THEN 'RUN' ELSE 'IN_PROGRESS' END
        WHEN r.fingerprint <> acquire.fingerprint AND r.fingerprint <> ALL (acquire.also) THEN 'MISMATCH'
        WHEN r.state = 'SUCCESS' AND (r.result IS NULL OR COALESCE(r.result_expires_at <= asked_at, false)) THEN 'GONE'
        WHEN r.state = 'SUCCESS' OR r.state = 'FAILED' AND NOT r.retryable THEN 'REPLAY'
        -- The answer to the same attempt's first question was lost.
        WHEN r.state = 'PROCESSING' AND r.attempt_token = token THEN 'OWN'
        WHEN NOT locked OR r.state = 'PROCESSING' AND NOT stale THEN 'IN_PROGRESS'
        WHEN r.takeover IN ('RERUN', 'RESUME') THEN 'RUN'
        -- It failed, and so did every attempt before it: nothing is left open that somebody would have to find out about.
        WHEN r.state = 'FAILED' AND NOT EXISTS (
            SELECT FROM idempotency.attempts AS a
            WHERE a.tenant = r.tenant AND a.operation = r.operation AND a.key = r.key AND a.generation = r.generation
              AND a.event IN ('ACQUIRED', 'TAKEOVER')
              AND NOT EXISTS (
                SELECT FROM idempotency.attempts AS e
                WHERE e.tenant = a.tenant AND e.operation = a.operation AND e.key = a.key AND e.fence = a.fence
                  AND e.ended_at IS NOT NULL AND e.event <> 'LEASE_LOST')
        ) THEN 'RUN'
        WHEN r.takeover = 'RESOLVE' AND acquire.resolver THEN 'RESOLVE'
        ELSE 'MANUAL'
    END;

    IF verdict IN ('RUN', 'RESOLVE') THEN
        PERFORM idempotency.durable();
        IF stale THEN
            PERFORM idempotency.record_lost(r, runner, 'taken over after the end of its lease');
        END IF;
        -- A failover may have set the sequence back behind the old fence.
        next := GREATEST(pg_catalog.nextval('idempotency.fence'), COALESCE(r.fence, 0) + 1);
        IF begins THEN
            DELETE FROM idempotency.steps AS s
            WHERE s.tenant = acquire.tenant AND s.operation = acquire.operation AND s.key = acquire.key;
        END IF;
        IF r.state IS NULL THEN
            -- No ON CONFLICT: a writer that does not know the lock makes this an error, not a second owner.
            INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
                lease_expires_at, fingerprint, attempt_token, takeover, executor, client, trace_id)
            VALUES (acquire.tenant, acquire.operation, acquire.key, 'PROCESSING', next, next, 1, asked_at, asked_at,
                asked_at + acquire.lease, acquire.fingerprint, token, acquire.takeover, runner, acquire.client, acquire.trace_id)
            RETURNING * INTO STRICT r;
        ELSE
            UPDATE idempotency.records AS x
            SET state = 'PROCESSING', fence = next,
                generation = CASE WHEN begins THEN next ELSE x.generation END,
                attempt = CASE WHEN begins THEN 1 ELSE x.attempt + 1 END,
                created_at = CASE WHEN begins THEN asked_at ELSE x.created_at END,
                fingerprint = CASE WHEN begins THEN acquire.fingerprint ELSE x.fingerprint END,
                takeover = CASE WHEN begins THEN acquire.takeover ELSE x.takeover END,
                acquired_at = asked_at, lease_expires_at = asked_at + acquire.lease, attempt_token = token,
                executor = runner, client = acquire.client, trace_id = acquire.trace_id, retryable = false,
                completed_at = NULL, result_expires_at = NULL, expires_at = NULL, error_code = NULL, error_message = NULL,
                result_type = NULL, result = NULL
            WHERE x.tenant = acquire.tenant AND x.operation = acquire.operation AND x.key = acquire.key
            RETURNING x.* INTO STRICT r;
        END IF;
        INSERT INTO idempotency.attempts (tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token,
            executor, trace_id, started_at)
        VALUES (r.tenant, r.operation, r.key, CASE WHEN stale OR verdict = 'RESOLVE' THEN 'TAKEOVER' ELSE 'ACQUIRED' END, 'PROCESSING', r.generation,
            r.fence, r.attempt, r.attempt_token, r.executor, r.trace_id, asked_at);
        expired := false;
        stale := false;
    END IF;
    -- Who asks again is told the same again: also to find out first what the attempt before did.
    IF verdict = 'OWN' THEN
        verdict := CASE WHEN r.takeover = 'RESOLVE' AND EXISTS (
            SELECT FROM idempotency.attempts AS a
            WHERE a.tenant = r.tenant AND a.operation = r.operation AND a.key = r.key AND a.fence = r.fence AND a.event = 'TAKEOVER'
        ) THEN 'RESOLVE' ELSE 'RUN' END;
    END IF;
    RETURN ROW(verdict, r.state, r.fence, r.generation, r.attempt, r.retryable,
        r.fingerprint,
        -- A duplicate that did not read its verdict could complete the key of another with it.
        CASE WHEN verdict IN ('RUN', 'RESOLVE', 'REPLAY') THEN r.attempt_token END,
        r.takeover, r.executor, r.client, r.trace_id, r.created_at, r.acquired_at, r.completed_at,
        r.lease_expires_at, r.result_expires_at, r.expires_at,
        CASE WHEN verdict <> 'MISMATCH' THEN r.error_code END, CASE WHEN verdict <> 'MISMATCH' THEN r.error_message END, r.result_type,
        -- A result only to whoever may have it.
        CASE WHEN verdict = 'REPLAY' AND COALESCE(r.result_expires_at > asked_at, true) THEN r.result END,
        expired, COALESCE(stale, false))::idempotency.acquisition;
END
$$;

-- Whether an attempt still owns its key is asked in one way only: state, fence and attempt token, inside the statement that
-- writes.
CREATE FUNCTION idempotency.lost(tenant text, operation text, key text, fence bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    RAISE EXCEPTION 'the attempt with fence % does not own the key any more', lost.fence
        USING ERRCODE = 'ZP003', SCHEMA = 'idempotency', TABLE = 'records',
              HINT = 'Roll back: another attempt has taken over, or the outcome is recorded. See idempotency.attempts.';
END
$$;

CREATE FUNCTION idempotency.renew(
    tenant text, operation text, key text, fence bigint, attempt_token bytea, lease interval DEFAULT interval '30 seconds'
) RETURNS timestamptz
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    until timestamptz;
BEGIN
    -- Also after the lease's end, as long as nobody has taken over; and never back.
    UPDATE idempotency.records AS r
    SET lease_expires_at = GREATEST(r.lease_expires_at, pg_catalog.statement_timestamp() + renew.lease)
    WHERE r.tenant = renew.tenant AND r.operation = renew.operation AND r.key = renew.key
      AND r.state = 'PROCESSING' AND r.fence = renew.fence AND r.attempt_token = renew.attempt_token
    RETURNING r.lease_expires_at INTO until;
    IF NOT FOUND THEN
        PERFORM idempotency.lost(renew.tenant, renew.operation, renew.key, renew.fence);
    END IF;
    RETURN until;
END
$$;

CREATE FUNCTION idempotency.complete(
    tenant text, operation text, key text, fence bigint, attempt_token bytea, result bytea, result_type text DEFAULT 'json/1',
    retention interval DEFAULT interval '72 hours', result_retention interval DEFAULT NULL
) RETURNS timestamptz
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    at timestamptz;
BEGIN
    IF complete.retention < interval '10 minutes' OR complete.result_retention < interval '10 minutes' THEN
        RAISE EXCEPTION 'retention must be at least 10 minutes, or NULL: for ever' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM idempotency.durable();
    UPDATE idempotency.records AS r
    SET state = 'SUCCESS', completed_at = pg_catalog.statement_timestamp(), lease_expires_at = NULL,
        expires_at = pg_catalog.statement_timestamp() + complete.retention,
        result_expires_at = pg_catalog.statement_timestamp() + complete.result_retention,
        result_type = complete.result_type, result = complete.result
    WHERE r.tenant = complete.tenant AND r.operation = complete.operation AND r.key = complete.key
      AND r.state = 'PROCESSING' AND r.fence = complete.fence AND r.attempt_token = complete.attempt_token
    RETURNING r.completed_at INTO at;
    IF NOT FOUND THEN
        -- Never answered as if it had just completed: business rows sent again with it would be committed twice.
        IF EXISTS (
            SELECT FROM idempotency.records AS r
            WHERE r.tenant = complete.tenant AND r.operation = complete.operation AND r.key = complete.key
              AND r.state = 'SUCCESS' AND r.fence = complete.fence AND r.attempt_token = complete.attempt_token
        ) THEN
            RAISE EXCEPTION 'this attempt has recorded its outcome already' USING ERRCODE = 'ZP002',
                HINT = 'Roll back: the first answer was lost, and all of it is committed. idempotency.acquire replays the result.';
        END IF;
        PERFORM idempotency.lost(complete.tenant, complete.operation, complete.key, complete.fence);
    END IF;
    RETURN at;
END
$$;

CREATE FUNCTION idempotency.fail(
    tenant text, operation text, key text, fence bigint, attempt_token bytea, error_code text, error_message text,
    retryable boolean DEFAULT false, result bytea DEFAULT NULL, result_type text DEFAULT NULL,
    retention interval DEFAULT interval '72 hours', result_retention interval DEFAULT NULL
) RETURNS timestamptz
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    at timestamptz;
BEGIN
    IF fail.retention < interval '10 minutes' OR fail.result_retention < interval '10 minutes' THEN
        RAISE EXCEPTION 'retention must be at least 10 minutes, or NULL: for ever' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM idempotency.durable();
    UPDATE idempotency.records AS r
    SET state = 'FAILED', completed_at = pg_catalog.statement_timestamp(), lease_expires_at = NULL, retryable = fail.retryable,
        expires_at = pg_catalog.statement_timestamp() + fail.retention,
        result_expires_at = pg_catalog.statement_timestamp() + fail.result_retention,
        error_code = fail.error_code, error_message = fail.error_message,
        result_type = fail.result_type, result = fail.result
    WHERE r.tenant = fail.tenant AND r.operation = fail.operation AND r.key = fail.key
      AND r.state = 'PROCESSING' AND r.fence = fail.fence AND r.attempt_token = fail.attempt_token
    RETURNING r.completed_at INTO at;
    IF NOT FOUND THEN
        SELECT r.completed_at INTO at FROM idempotency.records AS r
        WHERE r.tenant = fail.tenant AND r.operation = fail.operation AND r.key = fail.key
          AND r.state = 'FAILED' AND r.fence = fail.fence AND r.attempt_token = fail.attempt_token;
        IF NOT FOUND THEN
            PERFORM idempotency.lost(fail.tenant, fail.operation, fail.key, fail.fence);
        END IF;
        RETURN at;
    END IF;
    INSERT INTO idempotency.attempts (tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token,
        executor, trace_id, started_at, ended_at, error_code, error_message, actor)
    SELECT r.tenant, r.operation, r.key, 'FAILED', 'FAILED', r.generation, r.fence, r.attempt, r.attempt_token, r.executor,
        r.trace_id, r.acquired_at, r.completed_at, r.error_code, r.error_message, r.executor
    FROM idempotency.records AS r
    WHERE r.tenant = fail.tenant AND r.operation = fail.operation AND r.key = fail.key;
    RETURN at;
END
$$;

CREATE FUNCTION idempotency.record_step(
    tenant text, operation text, key text, fence bigint, attempt_token bytea, name text, result bytea,
    result_type text DEFAULT 'json/1'
) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    life bigint;
BEGIN
    PERFORM idempotency.durable();
    -- Shared with other steps, and against a takeover: an attempt that has lost its key must not add one behind it.
    SELECT r.generation INTO life FROM idempotency.records AS r
    WHERE r.tenant = record_step.tenant AND r.operation = record_step.operation AND r.key = record_step.key
      AND r.state = 'PROCESSING' AND r.fence = record_step.fence AND r.attempt_token = record_step.attempt_token
    FOR SHARE;
    IF NOT FOUND THEN
        PERFORM idempotency.lost(record_step.tenant, record_step.operation, record_step.key, record_step.fence);
    END IF;
    INSERT INTO idempotency.steps (tenant, operation, key, generation, name, fence, result_type, result)
    VALUES (record_step.tenant, record_step.operation, record_step.key, life, record_step.name, record_step.fence,
        record_step.result_type, record_step.result)
    ON CONFLICT DO NOTHING; -- sent again
END
$$;

-- Ends a dead attempt where its rule lets anybody run again. A person or the compensator asks; false: it was not stale any
-- more, or its rule asks for somebody who knows what happened.
CREATE FUNCTION idempotency.rescue(
    tenant text, operation text, key text, fence bigint, actor text, reason text, retention interval DEFAULT interval '72 hours'
) RETURNS boolean
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    r    idempotency.records;
    next bigint;
BEGIN
    IF NOT pg_catalog.pg_try_advisory_xact_lock(idempotency.lock_id(rescue.tenant, rescue.operation, rescue.key)) THEN
        RETURN false;
    END IF;
    BEGIN
        SELECT * INTO r FROM idempotency.records AS x
        WHERE x.tenant = rescue.tenant AND x.operation = rescue.operation AND x.key = rescue.key
          AND x.state = 'PROCESSING' AND x.fence = rescue.fence AND x.lease_expires_at <= pg_catalog.statement_timestamp()
          AND x.takeover IN ('RERUN', 'RESUME')
        FOR UPDATE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    IF r.state IS NULL THEN
        RETURN false;
    END IF;
    PERFORM idempotency.record_lost(r, rescue.actor, rescue.reason);
    next := GREATEST(pg_catalog.nextval('idempotency.fence'), r.fence + 1);
    UPDATE idempotency.records AS x
    SET state = 'FAILED', retryable = true, fence = next, completed_at = pg_catalog.statement_timestamp(),
        lease_expires_at = NULL, expires_at = pg_catalog.statement_timestamp() + rescue.retention,
        error_code = 'LEASE_EXPIRED', error_message = rescue.reason
    WHERE x.tenant = r.tenant AND x.operation = r.operation AND x.key = r.key;
    INSERT INTO idempotency.attempts (tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token,
        executor, trace_id, started_at, error_code, error_message, actor, reason)
    VALUES (r.tenant, r.operation, r.key, 'RESCUED', 'FAILED', r.generation, next, r.attempt, r.attempt_token, r.executor,
        r.trace_id, r.acquired_at, 'LEASE_EXPIRED', rescue.reason, rescue.actor, rescue.reason);
    RETURN true;
END
$$;

-- For a table of the service that is written outside the transaction that completes: a trigger BEFORE UPDATE, by which the column
-- named in its argument ("fence" without one) never goes back. An attempt that has lost its key cannot overwrite what a later one
-- has written. One query for both rows: a name is only known here.
CREATE FUNCTION idempotency.fence_guard() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    name    constant text := COALESCE(TG_ARGV[0], 'fence');
    written bigint;
    given   bigint;
BEGIN
    EXECUTE pg_catalog.format('SELECT ($1).%1$I, ($2).%1$I', name) INTO written, given USING OLD, NEW;
    IF given < written OR given IS NULL AND written IS NOT NULL THEN
        RAISE EXCEPTION 'the row was written with fence % and is not overwritten with fence %', written, COALESCE(given::text, 'NULL')
            USING ERRCODE = 'ZP004', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, COLUMN = name, CONSTRAINT = TG_NAME,
                  HINT = 'Stop: another attempt has taken the key over.';
    END IF;
    RETURN NEW;
END
$$;

CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 4 $$;
-- +goose StatementEnd

COMMENT ON COLUMN idempotency.attempts.event IS
    'ACQUIRED, TAKEOVER: a leased attempt began. FAILED: a final failure. RESCUED: the compensator ended a stale attempt. LEASE_LOST: a stale attempt lost its key, by takeover or rescue. OPERATOR: a person changed the record.';
COMMENT ON COLUMN idempotency.attempts.ended_at IS
    'When the attempt ended. NULL: it had not. LEASE_LOST: when its ownership ended.';

COMMENT ON TABLE idempotency.steps IS
    'Recovery points of leased operations: what a finished step came to, so that an attempt that takes over does not do it again.';
COMMENT ON COLUMN idempotency.steps.tenant IS 'Whose key it is.';
COMMENT ON COLUMN idempotency.steps.operation IS 'What the key is for.';
COMMENT ON COLUMN idempotency.steps.key IS 'The client''s unique value.';
COMMENT ON COLUMN idempotency.steps.generation IS 'The life of the key that the step belongs to; see idempotency.records.';
COMMENT ON COLUMN idempotency.steps.name IS 'The step, as the program names it.';
COMMENT ON COLUMN idempotency.steps.fence IS 'Number of the attempt that finished it.';
COMMENT ON COLUMN idempotency.steps.recorded_at IS 'When it was recorded.';
COMMENT ON COLUMN idempotency.steps.result_type IS 'Codec and version of the result; begins with json where the bytes are JSON.';
COMMENT ON COLUMN idempotency.steps.result IS 'What the step came to.';
COMMENT ON CONSTRAINT steps_pkey ON idempotency.steps IS 'A step is recorded once in each life of its key.';

COMMENT ON TYPE idempotency.acquisition IS
    'What idempotency.acquire answers: the verdict, and the record as it is now. RUN: the key is yours, with this fence and attempt token. REPLAY: result or error are the answer. GONE: done, its result was dropped. MISMATCH: the key was used with another payload. IN_PROGRESS: ask again later. RESOLVE: the key is yours, but find out first what the attempt before you did. MANUAL: its owner died, and a person must find out.';
COMMENT ON FUNCTION idempotency.fingerprint_of(bytea) IS
    'Fingerprint of a request''s payload, the same as FingerprintBytes in the library.';
COMMENT ON FUNCTION idempotency.downstream_key(text, text, text, bigint, text) IS
    'Idempotency key for a call to somebody else, the same as DownstreamKey in the library: the same in every attempt of one life of the key (tenant, operation, key, generation), another one for every name.';
COMMENT ON FUNCTION idempotency.acquire(text, text, text, bytea, bytea, interval, text, text, text, text, bytea[], boolean) IS
    'Asks for a key in the leased mode. Commit it before you call anybody; or do all of it in one transaction, and nothing is seen of it before COMMIT. Never waits. Give an attempt_token of your own (16 random bytes) to be able to ask again after a lost answer.';
COMMENT ON FUNCTION idempotency.renew(text, text, text, bigint, bytea, interval) IS
    'Keeps the key for another lease. ZP003: it is not yours any more.';
COMMENT ON FUNCTION idempotency.complete(text, text, text, bigint, bytea, bytea, text, interval, interval) IS
    'Records success; call it in the transaction of the business rows. Retention NULL: for ever. ZP002: it was recorded before; ZP003: the key is not yours any more. Roll back after both.';
COMMENT ON FUNCTION idempotency.fail(text, text, text, bigint, bytea, text, text, boolean, bytea, text, interval, interval) IS
    'Records a failure: final, or retryable, which the next caller may try again. ZP003: the key is not yours any more.';
COMMENT ON FUNCTION idempotency.record_step(text, text, text, bigint, bytea, text, bytea, text) IS
    'Records what a step came to. ZP003: the key is not yours any more.';
COMMENT ON FUNCTION idempotency.rescue(text, text, text, bigint, text, text, interval) IS
    'Makes a stale record with the rule RERUN or RESUME a retryable failure, for the compensator.';
COMMENT ON FUNCTION idempotency.fence_guard() IS
    'Trigger function for tables of the service: refuses an UPDATE that sets the fence column back, with ZP004. CREATE TRIGGER ... BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION idempotency.fence_guard(''column'').';
COMMENT ON FUNCTION idempotency.durable() IS
    'Makes the transaction wait for the disk when it commits, if the session''s synchronous_commit would not.';
COMMENT ON FUNCTION idempotency.lost(text, text, text, bigint) IS 'Raises ZP003.';
COMMENT ON FUNCTION idempotency.record_lost(idempotency.records, text, text) IS
    'Notes in idempotency.attempts that the record''s owner has lost it.';

-- +goose Down

COMMENT ON COLUMN idempotency.attempts.event IS
    'ACQUIRED, TAKEOVER: a leased attempt began. FAILED: a final failure. RESCUED: the compensator ended a stale attempt. LEASE_LOST: an owner found its lease gone. OPERATOR: a person changed the record.';
COMMENT ON COLUMN idempotency.attempts.ended_at IS 'When the attempt ended. NULL: it had not.';

DROP FUNCTION idempotency.fence_guard();
DROP FUNCTION idempotency.rescue(text, text, text, bigint, text, text, interval);
DROP FUNCTION idempotency.record_step(text, text, text, bigint, bytea, text, bytea, text);
DROP FUNCTION idempotency.fail(text, text, text, bigint, bytea, text, text, boolean, bytea, text, interval, interval);
DROP FUNCTION idempotency.complete(text, text, text, bigint, bytea, bytea, text, interval, interval);
DROP FUNCTION idempotency.renew(text, text, text, bigint, bytea, interval);
DROP FUNCTION idempotency.lost(text, text, text, bigint);
DROP FUNCTION idempotency.acquire(text, text, text, bytea, bytea, interval, text, text, text, text, bytea[], boolean);
DROP FUNCTION idempotency.record_lost(idempotency.records, text, text);
DROP FUNCTION idempotency.durable();
DROP FUNCTION idempotency.downstream_key(text, text, text, bigint, text);
DROP FUNCTION idempotency.fingerprint_of(bytea);
DROP TYPE idempotency.acquisition;
DROP TABLE idempotency.steps;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 3 $$;
-- +goose StatementEnd
