// Package edges gives functions to the edges.
package edges

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/txn"
)

var pool *pgxpool.Pool

func ask(ctx context.Context) error { // want ask:"1 effects"
	_, err := pool.Exec(ctx, `SELECT 1`)
	return err
}

func handle(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) { // want handle:"1 effects"
	return nil, ask(ctx) // want `calls ask`
}

func messages(inbox *idempotencymsg.Inbox) idempotencymsg.Config {
	config := idempotencymsg.Config{Handler: handle}
	config.DeadLetter = func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message, reason error) error {
		return ask(ctx) // want `calls ask`
	}
	inbox.HandleWith(context.Background(), idempotencymsg.Message{}, func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
		return nil, ask(ctx) // want `calls ask`
	})
	_ = idempotencymsg.Handler(func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
		return nil, ask(ctx) // want `calls ask`
	})
	return config
}

func post(w http.ResponseWriter, r *http.Request) { // want post:"1 effects"
	_ = ask(r.Context()) // want `calls ask`
}

func leased(w http.ResponseWriter, r *http.Request) { // want leased:"1 effects"
	_ = ask(r.Context())
	_ = idempotencyhttp.OnCommit(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return ask(ctx) // want `calls ask`
	})
}

type handler struct{}

func (handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { // want ServeHTTP:"1 effects"
	_ = ask(r.Context()) // want `calls ask`
}

func routes(mux *http.ServeMux, m *idempotencyhttp.Middleware) {
	mux.Handle("POST /orders", m.Operation("order.create")(http.HandlerFunc(post)))
	once := m.OperationOf(func(*http.Request) string { return "" })
	mux.Handle("POST /x", once(handler{}))
	mux.Handle("POST /y", m.Operation("y")(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = ask(r.Context()) // want `calls ask`
	})))
	mux.Handle("POST /pay", m.Leased("order.pay")(http.HandlerFunc(leased)))
	mux.Handle("POST /mux", m.Operation("z")(mux))
}

type resolver struct{}

func (resolver) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, found idempotency.Resolution) error { // want Commit:"1 effects"
	return ask(ctx) // want `calls ask`
}

// A handler of whatever: it takes its transaction from the context.
func unary(ctx context.Context, sku string) error { // want unary:"1 effects"
	tx, _ := txn.FromContext(ctx)
	if err := ask(ctx); err != nil { // want `calls ask`
		return err
	}
	_, err := tx.Exec(ctx, `SELECT 1`)
	return err
}

func register() func(context.Context) error {
	return func(ctx context.Context) error {
		tx, ok := txn.FromContext(ctx)
		if !ok {
			return ask(ctx)
		}
		_ = ask(ctx)          // want `calls ask`
		return tx.Commit(ctx) // want `ends the transaction`
	}
}
