package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// naive is what services write by hand, as usually described: look, claim, work, complete, in one transaction and seven
// round trips. It has neither fences nor a lock, so it spares what those cost.
type naive struct {
	pool                  *pgxpool.Pool
	look, claim, complete string
}

func newNaive(table string, pool *pgxpool.Pool) *naive {
	return &naive{
		pool: pool,
		look: `SELECT state, fingerprint, result FROM ` + table + ` WHERE tenant = $1 AND operation = $2 AND key = $3`,
		claim: `INSERT INTO ` + table + ` (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
				lease_expires_at, expires_at, fingerprint, attempt_token, takeover, executor)
			VALUES ($1, $2, $3, 'PROCESSING', 1, 1, 1, now(), now(), now() + interval '30 s', now() + interval '72 h', $4, $5, 'MANUAL', $6)
			ON CONFLICT DO NOTHING`,
		complete: `UPDATE ` + table + ` SET state = 'SUCCESS', completed_at = statement_timestamp(), lease_expires_at = NULL,
				result_type = 'bytes/1', result = $4
			WHERE tenant = $1 AND operation = $2 AND key = $3`,
	}
}

var errNaiveDuplicate = errors.New("a fresh order was taken for a duplicate")

func (n *naive) place(ctx context.Context, o order) error {
	fingerprint := idempotency.FingerprintBytes(o.payload()).Bytes()
	return pgx.BeginFunc(ctx, n.pool, func(tx pgx.Tx) error {
		var state string
		var print, result []byte
		err := tx.QueryRow(ctx, n.look, idempotency.SingleTenant, create.Name, o.key).Scan(&state, &print, &result)
		if !errors.Is(err, pgx.ErrNoRows) {
			return errors.Join(errNaiveDuplicate, err)
		}
		token := make([]byte, 16)
		_, _ = rand.Read(token) // never fails
		claimed, err := tx.Exec(ctx, n.claim, idempotency.SingleTenant, create.Name, o.key, fingerprint, token, "bench:1:0a1b2c3d")
		if err != nil {
			return err
		}
		if claimed.RowsAffected() != 1 {
			return errNaiveDuplicate
		}
		if err := o.place(ctx, tx); err != nil {
			return err
		}
		completed, err := tx.Exec(ctx, n.complete, idempotency.SingleTenant, create.Name, o.key, o.receipt())
		if err == nil && completed.RowsAffected() != 1 {
			err = fmt.Errorf("completed %d rows", completed.RowsAffected())
		}
		return err
	})
}
