package txn_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

var createOrder = idempotency.Operation{Name: "order.create"}

// openPool and newOrderRunner are called once, when the program starts.
func openPool(ctx context.Context, database string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(database)
	if err != nil {
		return nil, err
	}
	txn.ConfigurePool(config)
	return pgxpool.NewWithConfig(ctx, config)
}

func newOrderRunner(pool *pgxpool.Pool) (*txn.Runner, error) {
	return txn.New(pool, &txn.Config{Operations: []idempotency.Operation{createOrder}})
}

// placeOrder takes the order once, however often it is called with the same key and body.
func placeOrder(ctx context.Context, runner *txn.Runner, customer, clientKey string, body []byte) (txn.Result[int64], error) {
	key, err := createOrder.Key(customer, clientKey)
	if err != nil {
		return txn.Result[int64]{}, err
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes(body)}
	return txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx pgx.Tx) (id int64, err error) {
		err = tx.QueryRow(ctx, `INSERT INTO orders (body) VALUES ($1) RETURNING id`, body).Scan(&id)
		return id, err // nil: the order and its record are one commit
	})
}

func ExampleWithIdempotency() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	pool, err := openPool(ctx, database)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, body json)`); err != nil {
		panic(err)
	}
	runner, err := newOrderRunner(pool)
	if err != nil {
		panic(err)
	}

	for range 2 { // a double click
		res, err := placeOrder(ctx, runner, "customer-7", "0197-click", []byte(`{"sku": "tea"}`))
		fmt.Println("order", res.Value, "replayed:", res.Replayed, err)
	}
	_, err = placeOrder(ctx, runner, "customer-7", "0197-click", []byte(`{"sku": "coffee"}`))
	fmt.Println(errors.Is(err, idempotency.ErrMismatch))
	// Output:
	// order 1 replayed: false <nil>
	// order 1 replayed: true <nil>
	// true
}
