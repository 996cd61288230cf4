-- The records that docs/audit.md asks about. Times are fixed, except where a question is about "now".

CREATE TABLE public.orders (id bigint PRIMARY KEY, tenant text NOT NULL, request_key text NOT NULL, total numeric NOT NULL);
INSERT INTO public.orders VALUES
    (499, 'acme', 'k-0900', 12.00), (501, 'acme', 'k-1001', 19.90), (502, 'acme', 'k-1002', 250.00), (600, 'acme', 'k-1099', 5.00);

INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
    completed_at, expires_at, executor, client, trace_id, fingerprint, attempt_token, result_type, result)
SELECT v.tenant, v.operation, v.key, 'SUCCESS', v.fence, v.fence, 1, v.at, v.at, v.at + v.took, v.expires_at,
    'web-1:4242:9f1c', 'mobile', v.trace_id, decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex'),
    'json/1', convert_to(v.result, 'UTF8')
FROM (VALUES
    ('acme', 'order.create', 'k-0900', 1, timestamptz '2026-03-07 22:10:00Z', interval '3 ms', NULL::timestamptz, NULL, NULL),
    ('acme', 'order.create', 'k-1001', 2, '2026-03-08 09:15:00Z', '4.2 ms', NULL, '4bf92f3577b34da6a3ce929d0e0e4736',
        '{"order_id": 501, "total": "19.90"}'),
    ('acme', 'order.create', 'k-1002', 3, '2026-03-08 09:16:00Z', '1350 ms', NULL, NULL, '{"order_id": 502, "total": "250.00"}'),
    ('acme', 'order.create', 'k-0800', 15, '2026-03-06 08:00:00Z', '5 ms', statement_timestamp() - interval '2 hours 30 minutes',
        NULL, '{"order_id": 480, "total": "7.00"}'),
    ('acme', 'payment.refund', 'k-3001', 4, '2026-03-08 11:00:00Z', '8 ms',
        statement_timestamp() + interval '1 day 12 hours', NULL, '{"refund_id": 71}'),
    ('acme', 'payment.refund', 'k-3002', 5, '2026-03-08 11:05:00Z', '12 ms',
        statement_timestamp() + interval '2 days 12 hours', NULL, '{"refund_id": 72}'),
    ('acme', 'payment.refund', 'k-3003', 6, '2026-03-08 11:10:00Z', '9 ms',
        statement_timestamp() + interval '30 days', NULL, '{"refund_id": 73}')
) AS v(tenant, operation, key, fence, at, took, expires_at, trace_id, result);

INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
    completed_at, executor, fingerprint, attempt_token, error_code, error_message)
SELECT v.tenant, 'order.create', v.key, 'FAILED', v.fence, v.fence, 1, v.at, v.at, v.at + interval '2 ms',
    'web-2:17:c03d', decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex'), v.code, v.message
FROM (VALUES
    ('acme',   'k-1003', 7,  statement_timestamp() - interval '1 hour',  'NO_STOCK', 'sold out'),
    ('acme',   'k-1004', 8,  statement_timestamp() - interval '2 hours', 'NO_STOCK', 'sold out'),
    ('globex', 'k-1001', 9,  statement_timestamp() - interval '3 hours', 'CREDIT_LIMIT', 'over the limit by 30.00'),
    ('globex', 'k-0700', 10, timestamptz '2026-03-07 08:00:00Z',         'NO_STOCK', 'sold out')
) AS v(tenant, key, fence, at, code, message);

INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
    lease_expires_at, takeover, executor, fingerprint, attempt_token)
SELECT v.tenant, 'payment.capture', v.key, 'PROCESSING', v.fence, v.fence, 1, v.at, v.at, v.at + interval '30 s',
    v.takeover, 'pay-1:88:77aa', decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex')
FROM (VALUES
    ('acme',   'k-2001', 11, timestamptz '2026-03-08 10:00:00Z', 'RESOLVE'),
    ('globex', 'k-2002', 12, timestamptz '2026-03-08 10:04:00Z', 'MANUAL')
) AS v(tenant, key, fence, at, takeover);

-- Taken over once.
INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
    completed_at, takeover, executor, fingerprint, attempt_token, result_type, result)
VALUES ('acme', 'payment.capture', 'k-2003', 'SUCCESS', 14, 13, 2, '2026-03-08 10:06:00Z', '2026-03-08 10:06:40Z',
    '2026-03-08 10:06:41.5Z', 'RESOLVE', 'pay-2:91:00be', decode(repeat('01', 33), 'hex'), decode(repeat('03', 16), 'hex'),
    'json/1', '{"payment_id": "pi_9"}');
INSERT INTO idempotency.attempts (tenant, operation, key, event, outcome, generation, fence, attempt, executor, started_at,
    ended_at, actor, reason)
VALUES
    ('acme', 'payment.capture', 'k-2003', 'ACQUIRED', 'PROCESSING', 13, 13, 1, 'pay-1:88:77aa', '2026-03-08 10:06:00Z',
        NULL, NULL, NULL),
    ('acme', 'payment.capture', 'k-2003', 'LEASE_LOST', NULL, 13, 13, 1, 'pay-1:88:77aa', '2026-03-08 10:06:00Z',
        '2026-03-08 10:06:40Z', 'pay-2:91:00be', 'taken over after the end of its lease'),
    ('acme', 'payment.capture', 'k-2003', 'TAKEOVER', 'PROCESSING', 13, 14, 2, 'pay-2:91:00be', '2026-03-08 10:06:40Z',
        NULL, NULL, NULL);
