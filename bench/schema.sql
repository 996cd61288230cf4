-- What the benchmark needs beside the schema idempotency: a small shop, and the table of the naive way.

CREATE TABLE orders (
    id        bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    reference text    NOT NULL,
    item      integer NOT NULL,
    quantity  integer NOT NULL
);

CREATE TABLE stock (
    item integer PRIMARY KEY,
    left_over bigint NOT NULL
);

INSERT INTO stock SELECT item, 1000000000 FROM generate_series(1, 10000) AS item;

-- The naive way gets our table: same columns, rules and indexes.
CREATE SCHEMA naive;

CREATE TABLE naive.records (LIKE idempotency.records INCLUDING ALL);
CREATE TRIGGER records_check BEFORE INSERT OR UPDATE ON naive.records
    FOR EACH ROW EXECUTE FUNCTION idempotency.check_record();

-- And once more without the two partial indexes, whose predicates name columns that its UPDATE changes: with them no such
-- UPDATE is HOT. They serve the leased mode and results dropped early, which a service may do without.
CREATE TABLE naive.lean_records (LIKE idempotency.records INCLUDING ALL EXCLUDING INDEXES);
ALTER TABLE naive.lean_records ADD PRIMARY KEY (tenant, operation, key);
CREATE INDEX ON naive.lean_records (expires_at);
CREATE TRIGGER records_check BEFORE INSERT OR UPDATE ON naive.lean_records
    FOR EACH ROW EXECUTE FUNCTION idempotency.check_record();

-- The least that a record can be.
CREATE TABLE floor_records (
    key    text PRIMARY KEY,
    result bytea NOT NULL
);
