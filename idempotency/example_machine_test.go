package idempotency_test

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

// newOrderStates is called once, when the program starts.
func newOrderStates() (*idempotency.Guard, error) {
	orders, err := idempotency.NewMachine("order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"},
		[]string{"paid", "refunded"},
	)
	if err != nil {
		return nil, err
	}
	return orders.Guard(idempotency.Column{Table: pgx.Identifier{"orders"}, Key: []string{"id"}, State: "status"})
}

var payOrder = idempotency.Operation{Name: "order.pay"}

// pay moves the order, once for each key of the client, however often it is called.
func pay(ctx context.Context, runner *txn.Runner, states *idempotency.Guard, clientKey string, order int64) (idempotency.Moved, error) {
	key, err := payOrder.Key(idempotency.SingleTenant, clientKey)
	if err != nil {
		return idempotency.Moved{}, err
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes(fmt.Append(nil, order))}
	res, err := txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx pgx.Tx) (idempotency.Moved, error) {
		moved, err := states.Move(ctx, tx, "paid", order)
		if errors.Is(err, idempotency.ErrTransition) {
			return moved, txn.Final("order_not_payable", err) // the same answer to every repeat
		}
		return moved, err
	})
	return res.Value, err
}

func ExampleGuard_Move() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	config, err := pgxpool.ParseConfig(database)
	if err != nil {
		panic(err)
	}
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `
		CREATE TABLE orders (
			id     bigint PRIMARY KEY,
			status text NOT NULL DEFAULT 'created'
				CONSTRAINT orders_status_check CHECK (status IN ('created', 'paid', 'shipped', 'delivered', 'refunded'))
		);
		INSERT INTO orders (id) VALUES (1);
		INSERT INTO orders VALUES (2, 'refunded')`); err != nil {
		panic(err)
	}
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{payOrder}})
	if err != nil {
		panic(err)
	}
	states, err := newOrderStates()
	if err != nil {
		panic(err)
	}

	fmt.Println(pay(ctx, runner, states, "click", 1))
	fmt.Println(pay(ctx, runner, states, "click", 1))   // sent again: the first answer
	fmt.Println(pay(ctx, runner, states, "another", 1)) // somebody else's request for the same
	_, err = pay(ctx, runner, states, "third", 2)
	fmt.Println(err)
	_, err = pay(ctx, runner, states, "fourth", 3)
	fmt.Println(errors.Is(err, idempotency.ErrNotFound))
	// Output:
	// {created paid false} <nil>
	// {created paid false} <nil>
	// {paid paid true} <nil>
	// order_not_payable: idempotency: transition is not allowed: order from "refunded" to paid (allowed from there: none)
	// true
}

func ExampleMachine() {
	orders, err := idempotency.NewMachine("order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"}, []string{"paid", "refunded"})
	fmt.Println(orders.Next("paid"), orders.Allows("created", "shipped"), err)
	_, err = idempotency.NewMachine("order", []string{"created"}, []string{"created", "paid"}, []string{"piad", "shipped"})
	fmt.Println(err)
	// Output:
	// [shipped refunded] false <nil>
	// idempotency: Machine order: paths must lead from a start to "piad", or starts must name it
}
