package txn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// A function that writes through the pool, on a pool of one connection: it would wait for the connection of its own
// transaction for ever.
func ExampleTracer() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	config, err := pgxpool.ParseConfig(database)
	if err != nil {
		panic(err)
	}
	config.MaxConns = 1
	txn.NewTracer(&txn.TracerConfig{Refuse: true, Log: slog.New(slog.DiscardHandler)}).AddTo(config.ConnConfig)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	runner, err := txn.New(pool, &txn.Config{
		Operations: []idempotency.Operation{createOrder},
		OnEvent: func(_ context.Context, e idempotency.Event) {
			if out, is := e.(idempotency.OutsideTransaction); is {
				fmt.Println("function of", out.Key.Operation(), "goes outside:", out.Call)
			}
		},
	})
	if err != nil {
		panic(err)
	}
	key, err := createOrder.Key("customer-7", "0197-click")
	if err != nil {
		panic(err)
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("tea"))}
	_, err = txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, _ pgx.Tx) (int, error) {
		//pgonce:allow pool: what the example is about
		_, err := pool.Exec(ctx, `INSERT INTO orders (body) VALUES ('tea')`)
		return 0, err
	})
	fmt.Println("refused:", errors.Is(err, txn.ErrOutsideTransaction))
	// Output:
	// function of order.create goes outside: acquire
	// refused: true
}
