package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// fresh is an order that nobody has placed before: one row inserted, one of 10,000 stock rows updated.
var fresh = group{
	name:      "fresh",
	names:     []string{"bare", "naive", "naive-lean", "floor", "pgonce"},
	baselines: []string{"bare", "naive"},
	setup:     setupFresh,
}

const (
	insertOrder = `INSERT INTO orders (reference, item, quantity) VALUES ($1, $2, $3)`
	takeStock   = `UPDATE stock SET left_over = left_over - $2 WHERE item = $1`
	resultSize  = 300
)

var create = idempotency.Operation{Name: "order.create"}

// order is one caller's order. Its key is time-ordered, and the same kind for every variant.
type order struct {
	key            string
	item, quantity int
}

func newOrder() (order, error) {
	id, err := uuid.NewV7()
	return order{key: id.String(), item: 1 + rand.IntN(10000), quantity: 1 + rand.IntN(3)}, err
}

// payload is the request's body, of which the fingerprint is made.
func (o order) payload() []byte {
	return fmt.Appendf(nil, `{"item":%d,"quantity":%d}`, o.item, o.quantity)
}

// place writes the order's business rows: the same code for all variants.
func (o order) place(ctx context.Context, tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
},
) error {
	if _, err := tx.Exec(ctx, insertOrder, o.key, o.item, o.quantity); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, takeStock, o.item, o.quantity)
	return err
}

// receipt is the result that is kept for replays.
func (o order) receipt() []byte {
	r := make([]byte, resultSize)
	for i := copy(r, o.key); i < len(r); i++ {
		r[i] = ' ' + byte(i%90)
	}
	return r
}

// run places the order and returns its receipt.
func (o order) run(ctx context.Context, tx pgx.Tx) ([]byte, error) {
	if err := o.place(ctx, tx); err != nil {
		return nil, err
	}
	return o.receipt(), nil
}

func setupFresh(ctx context.Context, _ *world, p *pools) ([]variant, error) {
	bare, err := p.plain(ctx)
	if err != nil {
		return nil, err
	}
	variants := []variant{ordering("bare", func(ctx context.Context, o order) error { return placeBare(ctx, bare, o) })}
	for _, by := range []struct{ name, table string }{{"naive", "naive.records"}, {"naive-lean", "naive.lean_records"}} {
		pool, err := p.plain(ctx)
		if err != nil {
			return nil, err
		}
		variants = append(variants, ordering(by.name, newNaive(by.table, pool).place))
	}
	floor, err := p.plain(ctx)
	if err != nil {
		return nil, err
	}
	variants = append(variants, ordering("floor", func(ctx context.Context, o order) error { return placeFloor(ctx, floor, o) }))
	pool, err := p.ours(ctx)
	if err != nil {
		return nil, err
	}
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	if err != nil {
		return nil, err
	}
	return append(variants, ordering("pgonce", func(ctx context.Context, o order) error { return placeOnce(ctx, runner, o) })), nil
}

// ordering is a variant that places one fresh order after another.
func ordering(name string, place func(context.Context, order) error) variant {
	return variant{name: name, worker: func(int, int) func(context.Context) error {
		return func(ctx context.Context) error {
			o, err := newOrder()
			if err != nil {
				return err
			}
			return place(ctx, o)
		}
	}}
}

// placeBare is the usual code without idempotency: four round trips.
func placeBare(ctx context.Context, pool *pgxpool.Pool, o order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return o.place(ctx, tx) })
}

// placeFloor is the least that any record of a key can cost: nobody looks, locks or checks, and one row with the key and the
// result is written in the same flush as COMMIT.
func placeFloor(ctx context.Context, pool *pgxpool.Pool, o order) error {
	return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if _, err := conn.Exec(ctx, `BEGIN`); err != nil {
			return err
		}
		if err := o.place(ctx, conn); err != nil {
			return err
		}
		last := &pgx.Batch{}
		last.Queue(`INSERT INTO floor_records (key, result) VALUES ($1, $2)`, o.key, o.receipt())
		last.Queue(`COMMIT`)
		return conn.SendBatch(ctx, last).Close()
	})
}

var errReplayed = errors.New("a fresh order was replayed")

// placeOnce is the same with pgonce.
func placeOnce(ctx context.Context, runner *txn.Runner, o order) error {
	req, err := request(create, o)
	if err != nil {
		return err
	}
	res, err := txn.WithIdempotency(ctx, runner, req, o.run)
	if err == nil && res.Replayed {
		return errReplayed
	}
	return err
}

func request(op idempotency.Operation, o order) (idempotency.Request, error) {
	key, err := op.Key(idempotency.SingleTenant, o.key)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes(o.payload())}, err
}
