package txnsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

var createOrder = idempotency.Operation{Name: "order.create"}

// open is called once, when the program starts.
func open(database string) (*sql.DB, *txnsql.Runner, error) {
	config, err := pgx.ParseConfig(database)
	if err != nil {
		return nil, nil, err
	}
	db := txnsql.OpenDB(config)
	db.SetMaxOpenConns(20)
	runner, err := txnsql.New(db, &txn.Config{Operations: []idempotency.Operation{createOrder}})
	return db, runner, err
}

// placeOrder takes the order once, however often it is called with the same key and body.
func placeOrder(ctx context.Context, runner *txnsql.Runner, customer, clientKey string, body []byte) (txn.Result[int64], error) {
	key, err := createOrder.Key(customer, clientKey)
	if err != nil {
		return txn.Result[int64]{}, err
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes(body)}
	return txnsql.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx *sql.Tx) (id int64, err error) {
		err = tx.QueryRowContext(ctx, `INSERT INTO orders (body) VALUES ($1) RETURNING id`, string(body)).Scan(&id)
		return id, err // nil: the order and its record are one commit
	})
}

func ExampleWithIdempotency() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	db, runner, err := open(database)
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, body json)`); err != nil {
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

func ExampleWithIdempotencyTx() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	db, runner, err := open(database)
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, `CREATE TABLE visits (n int); CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, body json)`); err != nil {
		panic(err)
	}
	key, err := createOrder.Key("customer-7", "0197-click")
	if err != nil {
		panic(err)
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(`{"sku": "tea"}`))}

	visit := func() error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.ExecContext(ctx, `INSERT INTO visits VALUES (1)`); err != nil { // each time
			return err
		}
		joined, err := txnsql.WithIdempotencyTx(ctx, runner, tx, req, func(ctx context.Context, tx *sql.Tx) (id int64, err error) { // once
			err = tx.QueryRowContext(ctx, `INSERT INTO orders (body) VALUES ('{"sku": "tea"}') RETURNING id`).Scan(&id)
			return id, err
		})
		if err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return err
		}
		fmt.Println("order", joined.Value, "replayed:", joined.Replayed)
		return joined.AfterCommit(ctx)
	}
	fmt.Println(visit(), visit())
	var visits, orders int
	if err := db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM visits), (SELECT count(*) FROM orders)`).Scan(&visits, &orders); err != nil {
		panic(err)
	}
	fmt.Println(visits, "visits,", orders, "order")
	// Output:
	// order 1 replayed: false
	// order 1 replayed: true
	// <nil> <nil>
	// 2 visits, 1 order
}
