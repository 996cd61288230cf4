// Package pgxpool is what the tests need of it.
package pgxpool

import (
	"context"

	"github.com/jackc/pgx/v5"
)

type Pool struct{}

func (*Pool) Acquire(ctx context.Context) (*Conn, error) { return nil, nil }

func (*Pool) Begin(ctx context.Context) (pgx.Tx, error) { return nil, nil }

func (*Pool) Exec(ctx context.Context, sql string, args ...any) (pgx.CommandTag, error) {
	return pgx.CommandTag{}, nil
}

func (*Pool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) { return nil, nil }

func (*Pool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row { return nil }

func (*Pool) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults { return nil }

func (*Pool) CopyFrom(ctx context.Context, table pgx.Identifier, cols []string) (int64, error) {
	return 0, nil
}
func (*Pool) Close() {}

type Conn struct{}

func (*Conn) Exec(ctx context.Context, sql string, args ...any) (pgx.CommandTag, error) {
	return pgx.CommandTag{}, nil
}

func (*Conn) Conn() *pgx.Conn { return nil }
func (*Conn) Release()        {}
