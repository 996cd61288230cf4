-- Records number $1 to $2 of $3, as a service with $7 tenants and the operations $6 leaves them in 30 days, oldest first.
-- What is rare is spread by numbers that have no divisor in common with 1,000, so that every tenant gets some of it.
INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
    completed_at, lease_expires_at, result_expires_at, expires_at, fingerprint, attempt_token, takeover, executor, client,
    trace_id, error_code, error_message, result_type, result)
SELECT CASE n.i % $7::bigint WHEN 0 THEN 'acme' WHEN 1 THEN 'globex' ELSE 'tenant-' || lpad((n.i % $7)::text, 3, '0') END,
       ($6::text[])[1 + n.i / $7 % cardinality($6)],
       CASE WHEN $4::boolean THEN id.random
            -- A UUIDv7 of the record's time.
            ELSE overlay(id.random PLACING substr(ms.hex, 1, 8) || '-' || substr(ms.hex, 9, 4) || '-7' FROM 1 FOR 15) END,
       fate.state, n.i, n.i, 1, born.created, born.created,
       CASE WHEN fate.state <> 'PROCESSING' THEN born.created + took.duration END,
       CASE WHEN fate.state = 'PROCESSING' THEN born.created + interval '30 s' END,
       CASE WHEN fate.state = 'SUCCESS' AND n.i % 499 = 3 THEN born.created + interval '1 day' END,
       CASE WHEN fate.state <> 'PROCESSING' THEN born.created + interval '29 days' END,
       $5::bytea, decode(md5(n.i::text), 'hex'),
       CASE WHEN fate.state = 'PROCESSING' THEN 'MANUAL' END,
       'web-1:4242:9f1c03ab', CASE WHEN n.i % 3 = 0 THEN 'mobile' END, md5('trace ' || n.i),
       CASE WHEN fate.state = 'FAILED' THEN 'NO_STOCK' END, CASE WHEN fate.state = 'FAILED' THEN 'sold out' END,
       CASE WHEN fate.state = 'SUCCESS' THEN 'json/1' END,
       CASE WHEN fate.state = 'SUCCESS' AND n.i % 997 <> 2 -- the others are tombstones
            THEN convert_to(rpad('{"order_id": ' || n.i || ', "total": "19.90", "note": "', 298, 'lorem ipsum ') || '"}', 'UTF8') END
FROM generate_series($1::bigint, $2) AS n(i)
CROSS JOIN LATERAL (SELECT gen_random_uuid()::text || substr(n.i::text, 1, 0) AS random) AS id -- one for each record
CROSS JOIN LATERAL (SELECT statement_timestamp() - interval '30 days' * (1 - n.i::float8 / $3::bigint) AS created) AS born
CROSS JOIN LATERAL (SELECT lpad(to_hex((extract(epoch FROM born.created) * 1000)::bigint), 12, '0') AS hex) AS ms
CROSS JOIN LATERAL (SELECT interval '1 ms' * (1 + n.i % 37 + CASE WHEN n.i % 100003 = 0 THEN 2000 ELSE 0 END) AS duration) AS took
CROSS JOIN LATERAL (SELECT CASE WHEN n.i % 9973 = 1 THEN 'PROCESSING' WHEN n.i % 97 = 0 THEN 'FAILED' ELSE 'SUCCESS' END AS state) AS fate
