-- +goose Up

CREATE SCHEMA idempotency;

COMMENT ON SCHEMA idempotency IS
    'pgonce: one record per idempotency key, committed in the same transaction as the business rows it stands for. Start with: SELECT * FROM idempotency.audit LIMIT 20.';

-- CACHE 1: with a cache, a session could hand out an old block after another session's newer one, and fences would
-- run backwards. A sequence never rolls back, so a fence is never given twice.
CREATE SEQUENCE idempotency.fence AS bigint CACHE 1;

COMMENT ON SEQUENCE idempotency.fence IS
    'Source of fences, one for the whole database: every acquisition of any key gets a higher one.';

-- Rules for one column are domains, rules between columns a trigger (check_record, below). As CHECKs of the table they
-- would cost every insert 150 µs, four times the rest of it: PostgreSQL reads and plans a table's CHECK expressions anew
-- for each statement, and keeps those of a domain and of a function for the session.
CREATE DOMAIN idempotency.tenant_name AS text COLLATE "C"
    CONSTRAINT records_tenant_check CHECK (octet_length(VALUE) BETWEEN 1 AND 128);
CREATE DOMAIN idempotency.operation_name AS text COLLATE "C"
    CONSTRAINT records_operation_check CHECK (octet_length(VALUE) BETWEEN 1 AND 128);
CREATE DOMAIN idempotency.key_value AS text COLLATE "C"
    CONSTRAINT records_key_check CHECK (octet_length(VALUE) BETWEEN 1 AND 255);
CREATE DOMAIN idempotency.client_name AS text COLLATE "C"
    CONSTRAINT records_client_check CHECK (octet_length(VALUE) BETWEEN 1 AND 255);
CREATE DOMAIN idempotency.record_state AS text COLLATE "C"
    CONSTRAINT records_state_check CHECK (VALUE IN ('INIT', 'PROCESSING', 'SUCCESS', 'FAILED'));
CREATE DOMAIN idempotency.takeover_rule AS text COLLATE "C"
    CONSTRAINT records_takeover_check CHECK (VALUE IN ('RERUN', 'RESUME', 'RESOLVE', 'MANUAL'));
-- A version byte and SHA-256.
CREATE DOMAIN idempotency.fingerprint AS bytea
    CONSTRAINT records_fingerprint_check CHECK (octet_length(VALUE) = 33);
CREATE DOMAIN idempotency.attempt_token AS bytea
    CONSTRAINT records_attempt_token_check CHECK (octet_length(VALUE) = 16);

CREATE TABLE idempotency.records (
    tenant            idempotency.tenant_name    NOT NULL,
    operation         idempotency.operation_name NOT NULL,
    key               idempotency.key_value      NOT NULL,
    state             idempotency.record_state   NOT NULL,
    fence             bigint                     NOT NULL,
    generation        bigint                     NOT NULL,
    created_at        timestamptz                NOT NULL,
    acquired_at       timestamptz,
    completed_at      timestamptz,
    lease_expires_at  timestamptz,
    result_expires_at timestamptz,
    expires_at        timestamptz,
    attempt           integer                    NOT NULL,
    retryable         boolean                    NOT NULL DEFAULT false,
    fingerprint       idempotency.fingerprint,
    attempt_token     idempotency.attempt_token,
    takeover          idempotency.takeover_rule,
    executor          text COLLATE "C",
    client            idempotency.client_name,
    trace_id          text COLLATE "C",
    error_code        text COLLATE "C",
    error_message     text COLLATE "C",
    result_type       text COLLATE "C",
    result            bytea,

    -- The key first. With keys in the order of time, orders, duplicates and what a checkpoint makes anew all meet in the
    -- index's youngest pages, however many tenants there are; and a key's value alone is found by this index too.
    CONSTRAINT records_pkey PRIMARY KEY (key, tenant, operation)
);

-- The shape of each state's row. The transitions are in the statements' WHERE clauses.
-- +goose StatementBegin
CREATE FUNCTION idempotency.check_record() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    broken text;
BEGIN
    -- What nearly every row is, in one expression: asking the rules one by one costs every order 27 µs.
    IF NEW.state = 'SUCCESS' AND NEW.generation <= NEW.fence AND NEW.fence >= 1 AND NEW.attempt >= 1 AND NOT NEW.retryable
            AND pg_catalog.num_nulls(NEW.fingerprint, NEW.attempt_token, NEW.acquired_at, NEW.executor, NEW.completed_at,
                          NEW.result_type) = 0
            AND pg_catalog.num_nonnulls(NEW.lease_expires_at, NEW.error_code, NEW.error_message) = 0 THEN
        RETURN NEW;
    END IF;

    broken := CASE
        -- A generation is the fence that began it. Fences only grow, so it can never be ahead.
        WHEN NEW.generation > NEW.fence
            THEN 'records_fence_check'
        WHEN NEW.state = 'INIT' AND (NEW.attempt <> 0 OR NEW.expires_at IS NULL
                OR pg_catalog.num_nonnulls(NEW.fingerprint, NEW.attempt_token, NEW.acquired_at, NEW.executor, NEW.lease_expires_at) > 0)
            THEN 'records_init_check'
        WHEN NEW.state <> 'INIT' AND (NEW.attempt < 1 OR NEW.fence < 1
                OR pg_catalog.num_nulls(NEW.fingerprint, NEW.attempt_token, NEW.acquired_at, NEW.executor) > 0)
            THEN 'records_acquired_check'
        WHEN NEW.state = 'PROCESSING' AND pg_catalog.num_nulls(NEW.lease_expires_at, NEW.takeover) > 0
            THEN 'records_processing_check'
        WHEN NEW.state IN ('INIT', 'PROCESSING')
                AND pg_catalog.num_nonnulls(NEW.completed_at, NEW.result, NEW.result_type, NEW.result_expires_at) > 0
            THEN 'records_open_check'
        WHEN NEW.state IN ('SUCCESS', 'FAILED') AND (NEW.completed_at IS NULL OR NEW.lease_expires_at IS NOT NULL)
            THEN 'records_final_check'
        -- A result that is NULL while its type is not is a tombstone: done, result gone.
        WHEN NEW.state = 'SUCCESS' AND NEW.result_type IS NULL
            THEN 'records_success_check'
        WHEN NEW.result IS NOT NULL AND NEW.result_type IS NULL
            THEN 'records_result_check'
        WHEN (NEW.state = 'FAILED') <> (NEW.error_code IS NOT NULL)
                OR (NEW.error_code IS NULL) <> (NEW.error_message IS NULL)
            THEN 'records_error_check'
        -- In the transactional mode an error leaves nothing, so only a leased record can be worth another attempt.
        WHEN NEW.retryable AND (NEW.state <> 'FAILED' OR NEW.takeover IS NULL)
            THEN 'records_retryable_check'
    END;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'row of idempotency.records breaks the rule "%" of state %', broken, NEW.state
            USING ERRCODE = 'check_violation', SCHEMA = 'idempotency', TABLE = 'records', CONSTRAINT = broken,
                  HINT = 'Each rule is one line of the function idempotency.check_record: \sf idempotency.check_record';
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER records_check BEFORE INSERT OR UPDATE ON idempotency.records
    FOR EACH ROW EXECUTE FUNCTION idempotency.check_record();

-- The purge asks for what has expired. Times of one retention come in order, so the insert goes to the rightmost page:
-- 65 bytes of WAL a record. BRIN would be free to write, but purged pages are filled again and their summaries keep
-- the old minimum for ever: every pass would then read the whole table.
CREATE INDEX records_expires_at_idx ON idempotency.records (expires_at);

-- Partial: records of the transactional mode never enter these two.
CREATE INDEX records_stale_idx ON idempotency.records (lease_expires_at) WHERE state = 'PROCESSING';
CREATE INDEX records_result_expires_at_idx ON idempotency.records (result_expires_at)
    WHERE result_expires_at IS NOT NULL AND result IS NOT NULL;

CREATE TABLE idempotency.attempts (
    tenant        idempotency.tenant_name    NOT NULL,
    operation     idempotency.operation_name NOT NULL,
    key           idempotency.key_value      NOT NULL,
    id            bigint      GENERATED ALWAYS AS IDENTITY,
    event         text        COLLATE "C" NOT NULL,
    outcome       text        COLLATE "C",
    generation    bigint      NOT NULL,
    fence         bigint      NOT NULL,
    attempt       integer     NOT NULL,
    attempt_token idempotency.attempt_token,
    executor      text        COLLATE "C",
    trace_id      text        COLLATE "C",
    started_at    timestamptz,
    ended_at      timestamptz,
    error_code    text        COLLATE "C",
    error_message text        COLLATE "C",
    actor         text        COLLATE "C",
    reason        text        COLLATE "C",
    recorded_at   timestamptz NOT NULL DEFAULT statement_timestamp(),

    CONSTRAINT attempts_pkey PRIMARY KEY (key, tenant, operation, id),
    CONSTRAINT attempts_event_check CHECK (event IN
        ('ACQUIRED', 'TAKEOVER', 'FAILED', 'RESCUED', 'LEASE_LOST', 'OPERATOR')),
    CONSTRAINT attempts_outcome_check CHECK (outcome IN ('PROCESSING', 'SUCCESS', 'FAILED'))
);

-- The number of the advisory lock of a key: the first 8 bytes of SHA-256 over the length-framed parts. The Go twin is
-- idempotency.Key.LockID; both must give the same, since every writer that changes a record's owner takes this lock.
-- +goose StatementBegin
CREATE FUNCTION idempotency.lock_id(tenant text, operation text, key text) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT ('x' || encode(substring(sha256(
        int8send(octet_length(tenant)::bigint)    || convert_to(tenant, 'UTF8')
     || int8send(octet_length(operation)::bigint) || convert_to(operation, 'UTF8')
     || int8send(octet_length(key)::bigint)       || convert_to(key, 'UTF8')
    ) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
$$;
-- +goose StatementEnd

-- Ends the statement, and so the transaction, from within an expression. STABLE, not IMMUTABLE: the planner would
-- run it while planning, also in the CASE branch that is never taken.
-- +goose StatementBegin
CREATE FUNCTION idempotency.refuse(code text, message text) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message;
END
$$;
-- +goose StatementEnd

-- Replaced by every migration: all ways of migrating leave the same number.
-- +goose StatementBegin
CREATE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 1 $$;
-- +goose StatementEnd

-- What \d+ and \df+ in psql say.

COMMENT ON TABLE idempotency.records IS
    'One row per idempotency key, the only proof that an operation was done. Written by the library in the transaction of the business rows. Never change it by hand: use the operator''s command. People read the view idempotency.audit.';
COMMENT ON COLUMN idempotency.records.tenant IS
    'Whose key it is, 1 to 128 bytes. A program with one tenant always writes the same.';
COMMENT ON COLUMN idempotency.records.operation IS
    'What the key is for (business_type), for example order.create, 1 to 128 bytes.';
COMMENT ON COLUMN idempotency.records.key IS
    'The client''s unique value (business_id), 1 to 255 bytes, compared byte for byte.';
COMMENT ON COLUMN idempotency.records.state IS
    'INIT: an issued token nobody used yet. PROCESSING: leased and running (the transactional mode never shows it). SUCCESS, FAILED: final, except that a retryable FAILED may be acquired again. TIMEOUT and EXPIRED are derived, see the view idempotency.audit.';
COMMENT ON COLUMN idempotency.records.fence IS
    'Number of the latest acquisition, from the sequence idempotency.fence; a later owner of the key has a higher one.';
COMMENT ON COLUMN idempotency.records.generation IS
    'The fence that began this life of the key. A key used again after its retention begins a new generation.';
COMMENT ON COLUMN idempotency.records.created_at IS
    'When this generation began: the start of the transaction (transactional mode), the first acquisition (leased mode), or when the token was issued (INIT).';
COMMENT ON COLUMN idempotency.records.acquired_at IS 'When the latest attempt began. NULL: INIT.';
COMMENT ON COLUMN idempotency.records.completed_at IS 'When the outcome was written. NULL: none yet.';
COMMENT ON COLUMN idempotency.records.lease_expires_at IS
    'Until when the owner has the key unless it renews. Past: stale, may be taken over as takeover allows. Only in PROCESSING.';
COMMENT ON COLUMN idempotency.records.result_expires_at IS
    'From then on the result counts as dropped, also before the purge drops it. NULL: it stays as long as the record.';
COMMENT ON COLUMN idempotency.records.expires_at IS
    'From then on the record counts as absent, also before the purge deletes it. NULL: kept for ever. PROCESSING never expires, whatever stands here.';
COMMENT ON COLUMN idempotency.records.attempt IS 'Number of the latest attempt in this generation, from 1. 0: INIT.';
COMMENT ON COLUMN idempotency.records.retryable IS 'FAILED only: the next caller may try again (leased mode).';
COMMENT ON COLUMN idempotency.records.fingerprint IS
    'Hash of the request: one version byte and SHA-256. Another request with the same key is a mismatch. NULL: INIT.';
COMMENT ON COLUMN idempotency.records.attempt_token IS
    '16 random bytes of the attempt that wrote the row; it alone may complete it. NULL: INIT.';
COMMENT ON COLUMN idempotency.records.takeover IS
    'What may happen when the owner dies: RERUN, RESUME (finished steps are not run again), RESOLVE (ask the other side first), MANUAL (a person decides). NULL: transactional mode.';
COMMENT ON COLUMN idempotency.records.executor IS
    'Who ran the latest attempt, host:pid:random. For people only. NULL: INIT.';
COMMENT ON COLUMN idempotency.records.client IS 'Who called, as the program names its callers. NULL: not told.';
COMMENT ON COLUMN idempotency.records.trace_id IS 'Trace of the latest attempt. NULL: not traced.';
COMMENT ON COLUMN idempotency.records.error_code IS 'FAILED only: code of the outcome, for example NO_STOCK.';
COMMENT ON COLUMN idempotency.records.error_message IS 'FAILED only: text of the error.';
COMMENT ON COLUMN idempotency.records.result_type IS
    'Codec and version of the result; begins with json where the bytes are JSON. NULL: no result was ever stored.';
COMMENT ON COLUMN idempotency.records.result IS
    'The answer that a duplicate gets, byte for byte. NULL with a result_type: a tombstone (done, answer gone); the key is still never run again.';

COMMENT ON CONSTRAINT records_pkey ON idempotency.records IS
    'Decides: of two transactions that complete one key, one commits.';
COMMENT ON FUNCTION idempotency.check_record() IS
    'The shape of a record in each state: a rule that is broken is named as the constraint of the error.';
COMMENT ON TRIGGER records_check ON idempotency.records IS
    'Runs idempotency.check_record. A trigger and not CHECKs, which PostgreSQL would plan anew for every insert.';
COMMENT ON DOMAIN idempotency.tenant_name IS 'Whose key it is, 1 to 128 bytes.';
COMMENT ON DOMAIN idempotency.operation_name IS 'What a key is for, 1 to 128 bytes.';
COMMENT ON DOMAIN idempotency.key_value IS 'A client''s unique value, 1 to 255 bytes.';
COMMENT ON DOMAIN idempotency.client_name IS 'Who called, 1 to 255 bytes.';
COMMENT ON DOMAIN idempotency.record_state IS 'A stored state of a record.';
COMMENT ON DOMAIN idempotency.takeover_rule IS 'What may happen when the owner of a leased record dies.';
COMMENT ON DOMAIN idempotency.fingerprint IS 'Version byte and SHA-256, not their text form: 33 bytes.';
COMMENT ON DOMAIN idempotency.attempt_token IS '16 random bytes, not their text form.';

COMMENT ON INDEX idempotency.records_expires_at_idx IS 'For the purge.';
COMMENT ON INDEX idempotency.records_stale_idx IS
    'For takeover and rescue, and for the view idempotency.stale. Holds leased records while they run, nothing else.';
COMMENT ON INDEX idempotency.records_result_expires_at_idx IS
    'For dropping results before their records. Holds only results with an end of their own.';

COMMENT ON TABLE idempotency.attempts IS
    'What happened to a key besides a plain success: append-only, in the order of id. A success in the transactional mode has no row here, its record says it all.';
COMMENT ON COLUMN idempotency.attempts.tenant IS 'As in idempotency.records.';
COMMENT ON COLUMN idempotency.attempts.operation IS 'As in idempotency.records.';
COMMENT ON COLUMN idempotency.attempts.key IS 'As in idempotency.records.';
COMMENT ON COLUMN idempotency.attempts.id IS 'Order of the rows of one key.';
COMMENT ON COLUMN idempotency.attempts.event IS
    'ACQUIRED, TAKEOVER: a leased attempt began. FAILED: a final failure. RESCUED: the compensator ended a stale attempt. LEASE_LOST: an owner found its lease gone. OPERATOR: a person changed the record.';
COMMENT ON COLUMN idempotency.attempts.outcome IS
    'State the event left the record in: PROCESSING, SUCCESS or FAILED. NULL: the event changed none.';
COMMENT ON COLUMN idempotency.attempts.generation IS 'Generation of the record then.';
COMMENT ON COLUMN idempotency.attempts.fence IS 'Fence of the attempt.';
COMMENT ON COLUMN idempotency.attempts.attempt IS 'Number of the attempt in its generation, from 1.';
COMMENT ON COLUMN idempotency.attempts.attempt_token IS '16 random bytes of the attempt.';
COMMENT ON COLUMN idempotency.attempts.executor IS 'Who ran the attempt, host:pid:random.';
COMMENT ON COLUMN idempotency.attempts.trace_id IS 'Trace of the attempt. NULL: not traced.';
COMMENT ON COLUMN idempotency.attempts.started_at IS 'When the attempt began.';
COMMENT ON COLUMN idempotency.attempts.ended_at IS 'When the attempt ended. NULL: it had not.';
COMMENT ON COLUMN idempotency.attempts.error_code IS 'Code of the failure. NULL: none.';
COMMENT ON COLUMN idempotency.attempts.error_message IS 'Text of the failure. NULL: none.';
COMMENT ON COLUMN idempotency.attempts.actor IS 'Who caused the event: an executor, the compensator or a person.';
COMMENT ON COLUMN idempotency.attempts.reason IS 'Why, in the actor''s words. NULL: not told.';
COMMENT ON COLUMN idempotency.attempts.recorded_at IS 'When this row was written.';

COMMENT ON SEQUENCE idempotency.attempts_id_seq IS 'Source of attempts.id.';

COMMENT ON FUNCTION idempotency.lock_id(text, text, text) IS
    'Number of the advisory lock of a key (tenant, operation, key), the same as in the library. Held while somebody runs the key: see pg_locks.';
COMMENT ON FUNCTION idempotency.refuse(text, text) IS
    'Raises an error with this SQLSTATE and message. For use inside an expression.';
COMMENT ON FUNCTION idempotency.schema_version() IS 'Version of this schema: the number of its newest migration.';

-- +goose Down

-- CASCADE: everything in the schema is ours. It also takes views of others that read our tables; a list of single DROPs
-- would only stop in the middle of it. Every record of what was done is gone afterwards.
DROP SCHEMA idempotency CASCADE;
