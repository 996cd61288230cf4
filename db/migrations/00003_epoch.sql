-- +goose Up

-- Which history of the database is this? What fronts keep names the epoch it belongs to. After a failover or a restore that
-- lost commits, what names another one is not believed.
CREATE TABLE idempotency.epoch (
    only_row   boolean     NOT NULL DEFAULT true,
    -- From the clock and not counted: a dump restored into the same server would count the same numbers once more.
    number     bigint      NOT NULL DEFAULT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint,
    changed_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    changed_by text        NOT NULL DEFAULT session_user,
    reason     text        NOT NULL DEFAULT 'migration',
    CONSTRAINT epoch_pkey PRIMARY KEY (only_row),
    CONSTRAINT epoch_only_row CHECK (only_row)
);

INSERT INTO idempotency.epoch DEFAULT VALUES;

-- +goose StatementBegin
CREATE FUNCTION idempotency.current_epoch() RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    number bigint := (SELECT e.number FROM idempotency.epoch AS e);
BEGIN
    IF pg_catalog.pg_is_in_recovery() THEN
        RETURN NULL;
    END IF;
    IF number IS NULL THEN
        RAISE EXCEPTION 'idempotency.epoch has no row' USING HINT = 'INSERT INTO idempotency.epoch DEFAULT VALUES';
    END IF;
    -- The first eight digits of a log file's name are the timeline: a promoted standby begins another. Two standbys that are
    -- promoted one after the other may begin the same one, so the server's start is part of the name too.
    RETURN (SELECT c.system_identifier FROM pg_catalog.pg_control_system() AS c)::text
        || '-' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)
        || '-' || (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint::text
        || '-' || number::text;
EXCEPTION
    WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
        RETURN 'row-' || number::text;
END
$$;

CREATE FUNCTION idempotency.begin_epoch(reason text) RETURNS text
    LANGUAGE plpgsql
    AS $$
BEGIN
    -- Fences that were handed out and lost must not come again.
    PERFORM pg_catalog.setval('idempotency.fence', pg_catalog.nextval('idempotency.fence') + 1000000000);
    UPDATE idempotency.epoch AS e
    SET number = GREATEST(e.number + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint),
        changed_at = statement_timestamp(), changed_by = session_user, reason = begin_epoch.reason;
    IF NOT FOUND THEN
        INSERT INTO idempotency.epoch (reason) VALUES (begin_epoch.reason);
    END IF;
    RETURN idempotency.current_epoch();
END
$$;
-- +goose StatementEnd

COMMENT ON TABLE idempotency.epoch IS
    'One row: the part of idempotency.current_epoch() that a restore must change. Change it with idempotency.begin_epoch(reason).';
COMMENT ON COLUMN idempotency.epoch.only_row IS 'Always true: there is one row.';
COMMENT ON COLUMN idempotency.epoch.number IS 'Microseconds since 1970 when the epoch began, never the same twice.';
COMMENT ON COLUMN idempotency.epoch.changed_at IS 'When it was changed last.';
COMMENT ON COLUMN idempotency.epoch.changed_by IS 'The session''s user who did.';
COMMENT ON COLUMN idempotency.epoch.reason IS 'Why.';
COMMENT ON FUNCTION idempotency.current_epoch() IS
    'The history this database is in: system identifier, timeline, start of the server and number of idempotency.epoch. NULL on a standby. Where the server does not tell identifier and timeline it is row-<number>: there a failover too needs begin_epoch().';
COMMENT ON FUNCTION idempotency.begin_epoch(text) IS
    'Run it after a restore, and after a failover where current_epoch() begins with row-: nothing that fronts keep is believed any more, and fences go on far ahead.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 3 $$;
-- +goose StatementEnd

-- +goose Down

DROP FUNCTION idempotency.begin_epoch(text);
DROP FUNCTION idempotency.current_epoch();
DROP TABLE idempotency.epoch;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 2 $$;
-- +goose StatementEnd
