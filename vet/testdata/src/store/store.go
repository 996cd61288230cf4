// Package store is a service's: some of it takes the transaction, some does not.
package store

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

type Store struct{ pool *pgxpool.Pool }

func (s *Store) Audit(ctx context.Context, what string) error { // want Audit:"1 effects"
	_, err := s.pool.Exec(ctx, `INSERT INTO audit VALUES ($1)`, what)
	return err
}

// Deeper goes by another function.
func (s *Store) Deeper(ctx context.Context) error { return s.Audit(ctx, "deeper") } // want Deeper:"1 effects"

// DBTX is sqlc's.
type DBTX interface {
	Exec(ctx context.Context, sql string, args ...any) (pgx.CommandTag, error)
}

type Queries struct{ db DBTX }

func New(db DBTX) *Queries { return &Queries{db} }

func (q *Queries) Insert(ctx context.Context) error { // want Insert:"1 effects"
	_, err := q.db.Exec(ctx, `INSERT INTO orders DEFAULT VALUES`)
	return err
}

func (q *Queries) WithTx(tx pgx.Tx) *Queries { return New(tx) }

// Twice goes by another method.
func (q *Queries) Twice(ctx context.Context) error { // want Twice:"1 effects"
	return q.Insert(ctx)
}

// Save asks what it is given.
func Save(ctx context.Context, db DBTX) error { // want Save:"1 effects"
	_, err := db.Exec(ctx, `INSERT INTO orders DEFAULT VALUES`)
	return err
}

// SaveOn is for a connection, whosever it is.
func SaveOn(ctx context.Context, conn *pgx.Conn) error { // want SaveOn:"1 effects"
	_, err := conn.Exec(ctx, `INSERT INTO orders DEFAULT VALUES`)
	return err
}

// Finish ends what it is given.
func Finish(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) } // want Finish:"1 effects"

// Notify calls somebody.
func Notify() error { // want Notify:"1 effects"
	_, err := http.Get("http://localhost/notify")
	return err
}

// Either is for both: with a transaction in the context, and without.
func (s *Store) Either(ctx context.Context) error {
	if tx, ok := txFrom(ctx); ok {
		return Save(ctx, tx)
	}
	return nil
}

func txFrom(context.Context) (pgx.Tx, bool) { return nil, false }

// Handle is given to a runner elsewhere.
func (s *Store) Handle(ctx context.Context, tx pgx.Tx) (int, error) { // want Handle:"1 effects"
	return 0, s.Audit(ctx, "handled")
}

// Once is a service's own way to call package txn.
func Once(ctx context.Context, r *txn.Runner, fn func(context.Context, pgx.Tx) (int, error)) { // want Once:"0 effects"
	_, _ = txn.WithIdempotency(ctx, r, idempotency.Request{}, fn)
}

// OnceSimply has another function around it.
func OnceSimply(ctx context.Context, r *txn.Runner, before, fn func(context.Context) error) { // want OnceSimply:"0 effects"
	_ = before(ctx)
	Once(ctx, r, func(ctx context.Context, tx pgx.Tx) (int, error) { return 0, fn(ctx) })
}
