// Package pgsource says where a runner's connections come from: a pgxpool.Pool, or a sql.DB over pgx.
package pgsource

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Source lends connections. Its methods are those of *pgxpool.Pool, but for the type of what is lent.
type Source interface {
	Acquire(ctx context.Context) (Lent, error)
	// Config is how connections are made, hooks included. It is read, never changed.
	Config() *pgxpool.Config

	// Each of these is one statement outside a transaction.

	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Lent is a connection that nobody else uses until Release, which drops it if it is closed, busy or in a transaction.
type Lent interface {
	Conn() *pgx.Conn
	Release()
}

// Pool is a pgxpool.Pool as a Source.
type Pool struct{ *pgxpool.Pool }

var _ Source = Pool{}

// Acquire is the pool's.
func (p Pool) Acquire(ctx context.Context) (Lent, error) {
	conn, err := p.Pool.Acquire(ctx)
	if err != nil {
		return nil, err // a nil *pgxpool.Conn would be no nil Lent
	}
	return conn, nil
}
