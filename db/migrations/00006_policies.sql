-- +goose Up

-- What running processes do with keys, changed while they run: gradual release, and a kill switch. A row is for one operation,
-- for all whose names begin alike, or for all; the narrowest row counts, as a whole.
CREATE TABLE idempotency.policies (
    scope       text        COLLATE "C" NOT NULL,
    name        text        COLLATE "C" NOT NULL DEFAULT '',
    enforcement text        COLLATE "C" NOT NULL DEFAULT 'enforce',
    percentage  smallint    NOT NULL DEFAULT 100,
    strategy    text        COLLATE "C",
    local_front boolean,
    wait        interval,
    actor       text        COLLATE "C",
    reason      text        COLLATE "C",
    changed_at  timestamptz NOT NULL DEFAULT statement_timestamp(),

    CONSTRAINT policies_pkey PRIMARY KEY (scope, name),
    CONSTRAINT policies_scope_check CHECK (scope IN ('operation', 'prefix', 'all')),
    CONSTRAINT policies_name_check CHECK (CASE WHEN scope = 'all' THEN name = '' ELSE octet_length(name) BETWEEN 1 AND 128 END),
    CONSTRAINT policies_enforcement_check CHECK (enforcement IN ('off', 'shadow', 'enforce')),
    CONSTRAINT policies_percentage_check CHECK (percentage BETWEEN 0 AND 100),
    -- The rest of the keys is in shadow: where all are, or none is looked at, there is no rest.
    CONSTRAINT policies_share_check CHECK (enforcement = 'enforce' OR percentage = 100),
    -- Not CACHE: a row of a table must not take an operation out of PostgreSQL.
    CONSTRAINT policies_strategy_check CHECK (strategy IN ('STRICT', 'HYBRID')),
    CONSTRAINT policies_wait_check CHECK (wait BETWEEN interval '0' AND interval '5 minutes'),
    CONSTRAINT policies_blame_check CHECK (octet_length(actor) <= 255 AND octet_length(reason) <= 2000),
    -- Whoever switches the protection off says who, and why. COALESCE: a CHECK that is NULL lets the row in.
    CONSTRAINT policies_off_check CHECK (enforcement <> 'off'
        OR COALESCE(btrim(actor), '') <> '' AND COALESCE(btrim(reason), '') <> '')
);

-- Who changed what, when, and why. Written by a trigger, so that no way of changing a policy goes past it.
CREATE TABLE idempotency.policy_changes (
    id         bigint      GENERATED ALWAYS AS IDENTITY,
    scope      text        COLLATE "C" NOT NULL,
    name       text        COLLATE "C" NOT NULL,
    old_row    jsonb,
    new_row    jsonb,
    actor      text        COLLATE "C",
    reason     text        COLLATE "C",
    changed_by text        COLLATE "C" NOT NULL DEFAULT session_user,
    changed_at timestamptz NOT NULL DEFAULT statement_timestamp(),

    CONSTRAINT policy_changes_pkey PRIMARY KEY (scope, name, id)
);

-- +goose StatementBegin
CREATE FUNCTION idempotency.policy_stamp() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    -- Two keys of one row's history would hide where it came from.
    IF TG_OP = 'UPDATE' AND (OLD.scope, OLD.name) IS DISTINCT FROM (NEW.scope, NEW.name) THEN
        RAISE EXCEPTION 'scope and name of a policy are not changed' USING ERRCODE = 'integrity_constraint_violation',
            HINT = 'DELETE it, and INSERT the other one.';
    END IF;
    NEW.changed_at := pg_catalog.statement_timestamp();
    -- Whoever changed the row last is not who changes it now: who and why are the statement's own, or the transaction's, or
    -- unknown. So an UPDATE to off that does not say them is refused.
    IF TG_OP = 'UPDATE' THEN
        NEW.actor := CASE WHEN pg_catalog.starts_with(NEW.actor, E'\x01') THEN NEW.actor
            ELSE NULLIF(pg_catalog.current_setting('idempotency.actor', true), '') END;
        NEW.reason := CASE WHEN pg_catalog.starts_with(NEW.reason, E'\x01') THEN NEW.reason
            ELSE NULLIF(pg_catalog.current_setting('idempotency.reason', true), '') END;
    END IF;
    -- Also of an INSERT, and all of them: no stored name begins with policy_said's mark, else it would look like one that was set.
    NEW.actor := pg_catalog.ltrim(NEW.actor, E'\x01');
    NEW.reason := pg_catalog.ltrim(NEW.reason, E'\x01');
    RETURN NEW;
END
$$;

-- Marks what the statement has set, for policy_stamp, which sees the row only: a column that was left looks like one that was
-- set to what it was. (A MERGE is said to set, in every row, what any of its UPDATEs sets.)
CREATE FUNCTION idempotency.policy_said() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    CASE TG_ARGV[0]
        WHEN 'actor' THEN NEW.actor := E'\x01' || NEW.actor;
        WHEN 'reason' THEN NEW.reason := E'\x01' || NEW.reason;
    END CASE;
    RETURN NEW;
END
$$;

-- A DELETE has no columns for who and why: they may be set for the transaction, as idempotency.actor and idempotency.reason.
CREATE FUNCTION idempotency.policy_log() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO idempotency.policy_changes (scope, name, old_row, actor, reason)
        VALUES (OLD.scope, OLD.name, pg_catalog.to_jsonb(OLD), NULLIF(pg_catalog.current_setting('idempotency.actor', true), ''),
                NULLIF(pg_catalog.current_setting('idempotency.reason', true), ''));
    ELSE
        INSERT INTO idempotency.policy_changes (scope, name, old_row, new_row, actor, reason)
        VALUES (NEW.scope, NEW.name, CASE WHEN TG_OP = 'UPDATE' THEN pg_catalog.to_jsonb(OLD) END, pg_catalog.to_jsonb(NEW), NEW.actor,
                NEW.reason);
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION idempotency.policy_keep() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    RAISE EXCEPTION '% of idempotency.% is refused: the history of policies is kept', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', HINT = 'Change policies with INSERT, UPDATE and DELETE of idempotency.policies.';
END
$$;
-- +goose StatementEnd

-- Before policies_stamp: triggers of one kind run in the order of their names.
CREATE TRIGGER policies_said_actor BEFORE UPDATE OF actor ON idempotency.policies
    FOR EACH ROW EXECUTE FUNCTION idempotency.policy_said('actor');
CREATE TRIGGER policies_said_reason BEFORE UPDATE OF reason ON idempotency.policies
    FOR EACH ROW EXECUTE FUNCTION idempotency.policy_said('reason');
CREATE TRIGGER policies_stamp BEFORE INSERT OR UPDATE ON idempotency.policies
    FOR EACH ROW EXECUTE FUNCTION idempotency.policy_stamp();
-- AFTER: an INSERT that ends as ON CONFLICT DO UPDATE is one change and not two.
CREATE TRIGGER policies_log AFTER INSERT OR UPDATE OR DELETE ON idempotency.policies
    FOR EACH ROW EXECUTE FUNCTION idempotency.policy_log();
-- For whoever was given too many rights. The tables' owner could also drop them.
CREATE TRIGGER policy_changes_keep BEFORE UPDATE OR DELETE OR TRUNCATE ON idempotency.policy_changes
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.policy_keep();
-- Where all rows go at once, policies_log sees none of them.
CREATE TRIGGER policies_keep BEFORE TRUNCATE ON idempotency.policies
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.policy_keep();

-- Executions that wrote no record, because a policy said so: each in the transaction of its business rows. So what was done
-- with a key is its record, if it has one, and its rows here, and nothing else.
CREATE TABLE idempotency.bypasses (
    tenant           idempotency.tenant_name    NOT NULL,
    operation        idempotency.operation_name NOT NULL,
    key              idempotency.key_value      NOT NULL,
    attempt_token    idempotency.attempt_token  NOT NULL,
    fingerprint      idempotency.fingerprint    NOT NULL,
    enforcement      text        COLLATE "C" NOT NULL,
    would_be         text        COLLATE "C" NOT NULL,
    outcome          text        COLLATE "C" NOT NULL,
    error_code       text        COLLATE "C",
    executor         text        COLLATE "C" NOT NULL,
    client           idempotency.client_name,
    trace_id         text        COLLATE "C",
    policy_change    bigint,
    began_at         timestamptz NOT NULL,
    bypassed_at      timestamptz NOT NULL,
    expires_at       timestamptz,
    resolution       text        COLLATE "C",
    reconciled_at    timestamptz,
    reconciled_by    text        COLLATE "C",
    reconcile_reason text        COLLATE "C",

    -- The key first, as in idempotency.records, and for its reasons.
    CONSTRAINT bypasses_pkey PRIMARY KEY (key, tenant, operation, attempt_token),
    CONSTRAINT bypasses_enforcement_check CHECK (enforcement IN ('off', 'shadow')),
    CONSTRAINT bypasses_would_be_check CHECK (would_be IN ('RUN', 'REPLAY', 'MISMATCH', 'IN_PROGRESS', 'GONE', 'NEWER')),
    CONSTRAINT bypasses_outcome_check CHECK (outcome IN ('SUCCESS', 'FAILED', 'ENDED')),
    CONSTRAINT bypasses_resolution_check CHECK (resolution IN ('DONE', 'RERUN')),
    CONSTRAINT bypasses_reconciled_check CHECK (num_nulls(resolution, reconciled_at, reconciled_by, reconcile_reason) IN (0, 4))
);

-- What a later call of the key must know of: its predicate is written out wherever it is asked for. Partial, so that shadow's
-- rows, which are the many, do not enter it.
CREATE INDEX bypasses_open_idx ON idempotency.bypasses (operation, key, tenant)
    WHERE (enforcement = 'off' OR would_be = 'IN_PROGRESS') AND outcome <> 'FAILED' AND resolution IS DISTINCT FROM 'RERUN';

-- Reports and the purge ask for times, and rows come in their order.
CREATE INDEX bypasses_bypassed_at_idx ON idempotency.bypasses USING brin (bypassed_at) WITH (autosummarize = on);

COMMENT ON TABLE idempotency.policies IS
    'What running processes do with keys: SELECT * FROM idempotency.policies. No row: every key is enforced. The narrowest row counts as a whole: operation before the longest prefix before all. Processes read it every few seconds; a change is for calls that begin after that.';
COMMENT ON COLUMN idempotency.policies.scope IS 'operation: the one called name. prefix: all whose names begin with name. all: every one.';
COMMENT ON COLUMN idempotency.policies.name IS 'Name of an operation, or its beginning. Empty for all.';
COMMENT ON COLUMN idempotency.policies.enforcement IS
    'enforce: once per key. shadow: the first outcome is recorded, later calls are executed and logged in idempotency.bypasses. off: records that exist are replayed, none is written, every execution is logged there.';
COMMENT ON COLUMN idempotency.policies.percentage IS 'Under enforce: the share of keys, by their hash, that is enforced. The others are in shadow.';
COMMENT ON COLUMN idempotency.policies.strategy IS 'STRICT: PostgreSQL alone. HYBRID: fronts too, where a process has any. NULL: as the program declares it.';
COMMENT ON COLUMN idempotency.policies.local_front IS 'Whether outcomes are kept in the process''s memory. NULL: as the program declares it.';
COMMENT ON COLUMN idempotency.policies.wait IS 'How long a duplicate waits for the first call; 0: not at all. NULL: as the program declares it.';
COMMENT ON COLUMN idempotency.policies.actor IS 'Who wrote this. NULL: the last change did not say. Required for off.';
COMMENT ON COLUMN idempotency.policies.reason IS 'Why. NULL: the last change did not say. Required for off.';
COMMENT ON COLUMN idempotency.policies.changed_at IS 'When. Set by a trigger.';

COMMENT ON TABLE idempotency.policy_changes IS
    'Every change of idempotency.policies, written by a trigger: SELECT * FROM idempotency.policy_changes ORDER BY id. Nothing here is changed or deleted.';
COMMENT ON COLUMN idempotency.policy_changes.id IS 'In the order of the changes.';
COMMENT ON COLUMN idempotency.policy_changes.scope IS 'Of the policy.';
COMMENT ON COLUMN idempotency.policy_changes.name IS 'Of the policy.';
COMMENT ON COLUMN idempotency.policy_changes.old_row IS 'The row as it was. NULL: there was none.';
COMMENT ON COLUMN idempotency.policy_changes.new_row IS 'The row as it is from then on. NULL: there is none.';
COMMENT ON COLUMN idempotency.policy_changes.actor IS 'Who, as the change says.';
COMMENT ON COLUMN idempotency.policy_changes.reason IS 'Why, as the change says.';
COMMENT ON COLUMN idempotency.policy_changes.changed_by IS 'The session''s user.';
COMMENT ON COLUMN idempotency.policy_changes.changed_at IS 'When.';

COMMENT ON FUNCTION idempotency.policy_stamp() IS
    'Trigger of idempotency.policies: when a row was changed, by whom and why as far as that was said, and that scope and name stay.';
COMMENT ON FUNCTION idempotency.policy_said() IS 'Trigger of idempotency.policies: which of actor and reason a statement sets.';
COMMENT ON FUNCTION idempotency.policy_log() IS 'Trigger of idempotency.policies: writes idempotency.policy_changes.';
COMMENT ON FUNCTION idempotency.policy_keep() IS 'Trigger of idempotency.policy_changes and idempotency.policies: refuses what would lose the history.';

COMMENT ON SEQUENCE idempotency.policy_changes_id_seq IS 'Numbers of idempotency.policy_changes.';

COMMENT ON TABLE idempotency.bypasses IS
    'Executions that wrote no record because of a policy, each committed with its business rows: what shadow would have replayed, and what the kill switch has let through and somebody must reconcile.';
COMMENT ON COLUMN idempotency.bypasses.tenant IS 'Whose key it is.';
COMMENT ON COLUMN idempotency.bypasses.operation IS 'What the key is for.';
COMMENT ON COLUMN idempotency.bypasses.key IS 'The client''s unique value.';
COMMENT ON COLUMN idempotency.bypasses.attempt_token IS 'Which attempt of the key it was, so that a lost COMMIT is found out about.';
COMMENT ON COLUMN idempotency.bypasses.fingerprint IS 'Of the payload that was executed.';
COMMENT ON COLUMN idempotency.bypasses.enforcement IS 'off or shadow: the policy it was executed under.';
COMMENT ON COLUMN idempotency.bypasses.would_be IS
    'What enforce would have done. RUN: the same, and recorded it (off). REPLAY, MISMATCH, GONE, NEWER: answered from the record. IN_PROGRESS: waited for whoever had the key.';
COMMENT ON COLUMN idempotency.bypasses.outcome IS
    'SUCCESS: the business rows are committed. FAILED: a Final, which was told and rolled back. ENDED: the function ended its transaction by itself, a part may be committed.';
COMMENT ON COLUMN idempotency.bypasses.error_code IS 'Of a FAILED or ENDED one.';
COMMENT ON COLUMN idempotency.bypasses.executor IS 'Which process, host:pid:random. For people only.';
COMMENT ON COLUMN idempotency.bypasses.client IS 'Who called, if the service says so.';
COMMENT ON COLUMN idempotency.bypasses.trace_id IS 'The call''s trace, if the service says so.';
COMMENT ON COLUMN idempotency.bypasses.policy_change IS 'idempotency.policy_changes.id of the policy it was executed under: who, and why.';
COMMENT ON COLUMN idempotency.bypasses.began_at IS 'When its transaction began.';
COMMENT ON COLUMN idempotency.bypasses.bypassed_at IS 'When this row was written, right before COMMIT.';
COMMENT ON COLUMN idempotency.bypasses.expires_at IS
    'Until when its record would have been kept: so long the key is not executed again under enforce. NULL: for ever.';
COMMENT ON COLUMN idempotency.bypasses.resolution IS
    'NULL: nobody has looked at it. DONE: the operation is done, a late call is told so. RERUN: a later call may run it.';
COMMENT ON COLUMN idempotency.bypasses.reconciled_at IS 'When somebody decided that.';
COMMENT ON COLUMN idempotency.bypasses.reconciled_by IS 'Who.';
COMMENT ON COLUMN idempotency.bypasses.reconcile_reason IS 'Why.';
COMMENT ON INDEX idempotency.bypasses_open_idx IS 'Keys that were executed without a record, and must not be again without a person''s word.';
COMMENT ON INDEX idempotency.bypasses_bypassed_at_idx IS 'For reports of the last days, and for the purge.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 6 $$;
-- +goose StatementEnd

-- +goose Down

DROP TABLE idempotency.bypasses;
DROP TABLE idempotency.policies;
DROP TABLE idempotency.policy_changes;
DROP FUNCTION idempotency.policy_keep();
DROP FUNCTION idempotency.policy_log();
DROP FUNCTION idempotency.policy_stamp();
DROP FUNCTION idempotency.policy_said();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT 5 $$;
-- +goose StatementEnd
