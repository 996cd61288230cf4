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
