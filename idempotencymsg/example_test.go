package idempotencymsg_test

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// One operation per handler: two handlers of the same message each handle it once.
var billing = idempotency.Operation{Name: "billing", Strategy: idempotency.StrategyEventual}

type invoice struct {
	Number string `json:"number"`
}

func newInbox(pool *pgxpool.Pool) (*idempotencymsg.Inbox, error) {
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{billing}})
	if err != nil {
		return nil, err
	}
	return idempotencymsg.New(runner, &idempotencymsg.Config{
		Operation:     billing,
		Handler:       bill,
		DeadLetter:    putAside,
		MaxDeliveries: 5,
	})
}

func bill(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
	var i invoice
	if err := json.Unmarshal(m.Payload, &i); err != nil {
		return nil, idempotencymsg.Poison(err) // no delivery will ever cure it
	}
	_, err := tx.Exec(ctx, `INSERT INTO bills (number) VALUES ($1)`, i.Number)
	return nil, err // nil: the bill and the mark that the message was handled are one commit
}

func putAside(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message, reason error) error {
	_, err := tx.Exec(ctx, `INSERT INTO put_aside (id, payload, reason) VALUES ($1, $2, $3)`, m.ID, m.Payload, reason.Error())
	return err
}

func ExampleInbox_HandleBatch() {
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
	if _, err := pool.Exec(ctx, `CREATE TABLE bills (number text); CREATE TABLE put_aside (id text, payload bytea, reason text)`); err != nil {
		panic(err)
	}
	inbox, err := newInbox(pool)
	if err != nil {
		panic(err)
	}

	received := []idempotencymsg.Message{
		{Tenant: idempotency.SingleTenant, ID: "evt-1", Payload: []byte(`{"number": "2026-1"}`)},
		{Tenant: idempotency.SingleTenant, ID: "evt-2", Payload: []byte(`{"number"`)},
		{Tenant: idempotency.SingleTenant, ID: "evt-1", Payload: []byte(`{"number": "2026-1"}`)},
	}
	for i, res := range inbox.HandleBatch(ctx, received) {
		fmt.Println(received[i].ID, res.Verdict, "ack:", res.Ack(), res.Err)
	}
	// Output:
	// evt-1 handled ack: true <nil>
	// evt-2 dead-lettered ack: true unexpected end of JSON input
	// evt-1 duplicate ack: true <nil>
}
