-- name: EpochGet :one
-- NULL on a standby. The time tells fronts how much of a record's life is left.
SELECT idempotency.current_epoch() AS epoch, pg_catalog.statement_timestamp()::timestamptz AS read_at;
