package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// replay is the answer to an order that was placed before, without any front.
var replay = group{
	name:      "replay",
	names:     []string{"select", "replay-retry", "replay", "replay-adaptive"},
	baselines: []string{"select"},
	setup:     setupReplay,
}

const (
	replayKeys = 20000
	// After some twenty duplicates in a row a runner looks up an operation's keys before it asks for their locks. To
	// measure the asking, each operation gets fewer, and there are many of them: enough for one slice, and the next
	// slice has a new runner.
	replayOperations = 2000
	perOperation     = 16
)

func setupReplay(ctx context.Context, w *world, p *pools) ([]variant, error) {
	plain, err := p.plain(ctx)
	if err != nil {
		return nil, err
	}
	var ours [3]*pgxpool.Pool
	for i := range ours {
		if ours[i], err = p.ours(ctx); err != nil {
			return nil, err
		}
	}
	orders, err := seedReplays(ctx, w, ours[0])
	if err != nil {
		return nil, err
	}
	// Callers share no keys: a runner merges concurrent calls of one key, and these are to be counted one by one.
	shared := func(name string, op func(ctx context.Context, o order) error) variant {
		return variant{name: name, worker: func(i, n int) func(context.Context) error {
			return func(ctx context.Context) error { return op(ctx, orders[rand.IntN(len(orders)/n)*n+i]) }
		}}
	}
	var runners [2]*txn.Runner
	for i := range runners {
		if runners[i], err = txn.New(ours[i], &txn.Config{Operations: []idempotency.Operation{create}}); err != nil {
			return nil, err
		}
	}
	return []variant{
		shared("select", func(ctx context.Context, o order) error { return selectRecord(ctx, plain, o) }),
		shared("replay-retry", func(ctx context.Context, o order) error { return placeAgain(ctx, runners[0], create, o, true) }),
		acquiring(ours[2], orders[0]),
		shared("replay-adaptive", func(ctx context.Context, o order) error { return placeAgain(ctx, runners[1], create, o, false) }),
	}, nil
}

// seedReplays places one order and copies its record to many other keys, and to many other operations.
func seedReplays(ctx context.Context, w *world, pool *pgxpool.Pool) ([]order, error) {
	orders, keys := make([]order, replayKeys), make([]string, replayKeys)
	for i := range orders {
		o, err := newOrder()
		if err != nil {
			return nil, err
		}
		if i > 0 {
			o.item, o.quantity = orders[0].item, orders[0].quantity // one payload, and so one fingerprint
		}
		orders[i], keys[i] = o, o.key
	}
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	if err != nil {
		return nil, err
	}
	if err := placeOnce(ctx, runner, orders[0]); err != nil {
		return nil, err
	}
	const copied = `state, fence, generation, created_at, acquired_at, completed_at, lease_expires_at, result_expires_at,
		expires_at, attempt, retryable, fingerprint, attempt_token, takeover, executor, client, trace_id, error_code,
		error_message, result_type, result`
	_, err = w.control.Exec(ctx, `INSERT INTO idempotency.records (tenant, operation, key, `+copied+`)
		SELECT r.tenant, names.operation, names.key, `+copied+`
		FROM idempotency.records AS r, (
			SELECT $2::text AS operation, unnest($3::text[]) AS key
			UNION ALL
			SELECT 'replay.' || n, $1 FROM generate_series(0, $4::int - 1) AS n) AS names
		WHERE r.operation = $2 AND r.key = $1`, keys[0], create.Name, keys[1:], replayOperations)
	if err != nil {
		return nil, fmt.Errorf("copy records: %w", err)
	}
	return orders, w.script(ctx, "VACUUM ANALYZE idempotency.records")
}

func placeAgain(ctx context.Context, runner *txn.Runner, op idempotency.Operation, o order, retry bool) error {
	req, err := request(op, o)
	if err != nil {
		return err
	}
	req.Retry = retry
	res, err := txn.WithIdempotency(ctx, runner, req, o.run)
	if err == nil && (!res.Replayed || len(res.Value) != resultSize) {
		return errors.New("an order that was placed before was not replayed")
	}
	return err
}

// acquiring replays without Request.Retry, and without the runner having learned that there are many duplicates.
func acquiring(pool *pgxpool.Pool, o order) variant {
	operations := make([]idempotency.Operation, replayOperations)
	for i := range operations {
		operations[i] = idempotency.Operation{Name: "replay." + strconv.Itoa(i)}
	}
	var runner *txn.Runner
	var used atomic.Int64
	return variant{
		name: "replay",
		prepare: func(ctx context.Context) (err error) {
			if runner, err = txn.New(pool, &txn.Config{Operations: operations}); err != nil {
				return err
			}
			used.Store(1)
			return placeAgain(ctx, runner, operations[0], o, false) // a runner's first call looks at the schema
		},
		worker: func(int, int) func(context.Context) error {
			var own, n int
			return func(ctx context.Context) error {
				if n%perOperation == 0 {
					if own = int(used.Add(1)) - 1; own >= len(operations) {
						return errors.New("replay: out of operations, raise replayOperations")
					}
				}
				n++
				return placeAgain(ctx, runner, operations[own], o, false)
			}
		},
	}
}
