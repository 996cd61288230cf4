// Package service is one with the real packages: lines that end in "found" are to be found, and no others.
package service

import (
	"context"
	"database/sql"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/service/store"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// Service has everything.
type Service struct {
	Pool   *pgxpool.Pool
	Store  *store.Store
	Runner *txn.Runner
	Inbox  *idempotencymsg.Inbox
	Once   *idempotencyhttp.Middleware
	DB     *sql.DB
	SQL    *txnsql.Runner
}

// PlaceSQL is Place by database/sql.
func (s *Service) PlaceSQL(ctx context.Context, req idempotency.Request) error {
	_, err := txnsql.WithIdempotency(ctx, s.SQL, req, func(ctx context.Context, tx *sql.Tx) (n int64, err error) {
		defer tx.Rollback()                                          //nolint:errcheck // found
		if _, err := s.DB.ExecContext(ctx, `SELECT 1`); err != nil { // found
			return 0, err
		}
		return n, tx.QueryRowContext(ctx, `SELECT 1`).Scan(&n)
	})
	return err
}

// Place takes an order.
func (s *Service) Place(ctx context.Context, req idempotency.Request) (int, error) {
	if _, err := s.Pool.Exec(ctx, `SELECT 1`); err != nil {
		return 0, err
	}
	res, err := txn.WithIdempotency(ctx, s.Runner, req, func(ctx context.Context, tx pgx.Tx) (id int, err error) {
		if err := s.Store.Audit(ctx, "order"); err != nil { // found
			return 0, err
		}
		if _, err := s.Pool.Exec(ctx, `SELECT 1`); err != nil { // found
			return 0, err
		}
		//pgonce:allow pool: a read of what never changes
		if _, err := s.Pool.Exec(ctx, `SELECT 1`); err != nil {
			return 0, err
		}
		defer tx.Rollback(ctx) //nolint:errcheck // found
		err = pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
			return savepoint.QueryRow(ctx, `INSERT INTO orders DEFAULT VALUES RETURNING id`).Scan(&id)
		})
		return id, err
	})
	return res.Value, err
}

// Pay calls somebody, where that is right and where it is not.
func (s *Service) Pay(ctx context.Context, req idempotency.Request, r *http.Request) error {
	_, err := txn.WithLease(ctx, s.Runner, req, func(context.Context, *txn.Lease) (*http.Response, error) {
		return http.DefaultClient.Do(r)
	}, func(_ context.Context, _ pgx.Tx, _ *http.Response) (int, error) {
		_, err := http.DefaultClient.Do(r) // found
		return 0, err
	})
	return err
}

// Handler is a route.
func (s *Service) Handler() http.Handler {
	return s.Once.Operation("order.create")(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_ = s.Store.Audit(r.Context(), "route") // found
	}))
}

// Config is an inbox's.
func (s *Service) Config() idempotencymsg.Config {
	return idempotencymsg.Config{Handler: func(ctx context.Context, _ pgx.Tx, _ idempotencymsg.Message) ([]byte, error) {
		return nil, s.Store.Audit(ctx, "message") // found
	}}
}
