-- name: AttemptInsertFailed :exec
-- The audit row of a final failure, in the transaction that records it. Copied from the record, so that both agree.
INSERT INTO idempotency.attempts (
    tenant, operation, key, event, outcome, generation, fence, attempt, attempt_token, executor, trace_id,
    started_at, ended_at, error_code, error_message, actor)
SELECT r.tenant, r.operation, r.key, 'FAILED', r.state, r.generation, r.fence, r.attempt, r.attempt_token, r.executor,
       r.trace_id, r.acquired_at, r.completed_at, r.error_code, r.error_message, r.executor
FROM idempotency.records AS r
WHERE r.tenant = @tenant AND r.operation = @operation AND r.key = @key
  -- Only what this very attempt wrote.
  AND r.attempt_token = @attempt_token AND r.state = 'FAILED';
