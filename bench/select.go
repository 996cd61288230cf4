package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// selectAll is the least that any replay from PostgreSQL has to do: read the row by its primary key.
const selectAll = `SELECT tenant, operation, key, state, fence, generation, created_at, acquired_at, completed_at,
	lease_expires_at, result_expires_at, expires_at, attempt, retryable, fingerprint, attempt_token, takeover, executor,
	client, trace_id, error_code, error_message, result_type, result
	FROM idempotency.records WHERE tenant = $1 AND operation = $2 AND key = $3`

func selectRecord(ctx context.Context, pool *pgxpool.Pool, o order) error {
	var r struct {
		tenant, operation, key, state                                            string
		fence, generation                                                        int64
		created                                                                  time.Time
		acquired, completed, lease, resultExpires, expires                       *time.Time
		attempt                                                                  int32
		retryable                                                                bool
		fingerprint, token                                                       []byte
		takeover, executor, client, traceID, errorCode, errorMessage, resultType *string
		result                                                                   []byte
	}
	err := pool.QueryRow(ctx, selectAll, idempotency.SingleTenant, create.Name, o.key).Scan(
		&r.tenant, &r.operation, &r.key, &r.state, &r.fence, &r.generation, &r.created, &r.acquired, &r.completed,
		&r.lease, &r.resultExpires, &r.expires, &r.attempt, &r.retryable, &r.fingerprint, &r.token, &r.takeover, &r.executor,
		&r.client, &r.traceID, &r.errorCode, &r.errorMessage, &r.resultType, &r.result)
	if err == nil && len(r.result) != resultSize {
		return errors.New("the record has no result")
	}
	return err
}
