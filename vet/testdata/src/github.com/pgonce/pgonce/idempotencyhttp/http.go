// Package idempotencyhttp is what the tests need of it.
package idempotencyhttp

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"
)

type Middleware struct{}

func (*Middleware) Operation(name string) func(http.Handler) http.Handler { return nil }

func (*Middleware) Leased(name string) func(http.Handler) http.Handler { return nil }

func (*Middleware) OperationOf(of func(*http.Request) string) func(http.Handler) http.Handler {
	return nil
}

func OnCommit(ctx context.Context, write func(context.Context, pgx.Tx) error) error { return nil }
