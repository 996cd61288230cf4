// Package sqlx is what the tests need of it.
package sqlx

import (
	"context"
	"database/sql"
)

type DB struct{ *sql.DB }

func (*DB) GetContext(ctx context.Context, dest any, query string, args ...any) error { return nil }

type Tx struct{ *sql.Tx }

func (*Tx) GetContext(ctx context.Context, dest any, query string, args ...any) error { return nil }

type QueryerContext interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func GetContext(ctx context.Context, q QueryerContext, dest any, query string, args ...any) error {
	return nil
}
