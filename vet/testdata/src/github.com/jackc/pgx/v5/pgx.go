// Package pgx is what the tests need of it.
package pgx

import "context"

type CommandTag struct{}

type Rows interface{ Close() }

type Row interface{ Scan(dest ...any) error }

type Batch struct{}

type Identifier []string

type BatchResults interface{ Close() error }

type Tx interface {
	Begin(ctx context.Context) (Tx, error)
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
	SendBatch(ctx context.Context, b *Batch) BatchResults
	Exec(ctx context.Context, sql string, args ...any) (CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) Row
	Conn() *Conn
}

type Conn struct{}

func Connect(ctx context.Context, url string) (*Conn, error) { return nil, nil }

func (*Conn) Begin(ctx context.Context) (Tx, error) { return nil, nil }

func (*Conn) Exec(ctx context.Context, sql string, args ...any) (CommandTag, error) {
	return CommandTag{}, nil
}
func (*Conn) QueryRow(ctx context.Context, sql string, args ...any) Row { return nil }
func (*Conn) Close(ctx context.Context) error                           { return nil }

func BeginFunc(ctx context.Context, db interface {
	Begin(ctx context.Context) (Tx, error)
}, fn func(Tx) error,
) error {
	return nil
}
