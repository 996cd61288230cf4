package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// check adds a round to the report: what its clients were told, and what the database says to that.
func (s *storm) check(ctx context.Context, answers []told, total *report) error {
	s.settle(ctx)
	rows := make([][]any, 0, len(answers))
	for i := range answers {
		t := &answers[i]
		total.add(t)
		var orderID *int64
		if t.outcome == executed || t.outcome == replayed {
			orderID = &t.order
		}
		rows = append(rows, []any{t.key, orderID, t.refused})
	}
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `CREATE TEMPORARY TABLE told (key text NOT NULL, order_id bigint, refused boolean NOT NULL) ON COMMIT DROP`); err != nil {
			return err
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"told"}, []string{"key", "order_id", "refused"}, pgx.CopyFromRows(rows)); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `ANALYZE told`); err != nil {
			return err
		}
		var keys, orders, duplicates, lost, unsettled int64
		if err := tx.QueryRow(ctx, checkSQL).Scan(&keys, &orders, &duplicates, &lost, &unsettled); err != nil {
			return err
		}
		total.keys += keys
		total.Orders += orders
		total.Duplicates += duplicates
		total.Lost += lost
		total.unsettled += unsettled
		total.P50, total.P99 = total.latencies.quantile(0.50), total.latencies.quantile(0.99)
		return nil
	})
	if err != nil {
		return fmt.Errorf("check what clients were told: %w", err)
	}
	return nil
}

// checkSQL compares what clients were told (temporary table told, a row per request) with demo.orders.
const checkSQL = `
WITH keys AS (
	SELECT key, count(*) FILTER (WHERE order_id IS NOT NULL OR refused) = 0 AS unsettled FROM told GROUP BY key
), per_key AS (
	SELECT k.key, k.unsettled, (SELECT count(*) FROM demo.orders o WHERE o.idempotency_key = k.key) AS orders FROM keys k
)
SELECT count(*),
       coalesce(sum(orders), 0)::bigint,
       count(*) FILTER (WHERE orders > 1),
       (SELECT count(*) FROM told t
        -- Told that there is this order, and it is not there, or it is another key's.
        WHERE (t.order_id IS NOT NULL
               AND NOT EXISTS (SELECT FROM demo.orders o WHERE o.id = t.order_id AND o.idempotency_key = t.key))
        -- Told that there will be no order, and there is one.
           OR (t.refused AND EXISTS (SELECT FROM demo.orders o WHERE o.idempotency_key = t.key))),
       count(*) FILTER (WHERE unsettled)
FROM per_key`

// settle waits, not for ever, until the service works on nothing any more: also for the requests whose clients have gone.
func (s *storm) settle(ctx context.Context) {
	working := func(i *instance) bool { return i.pool.Stat().AcquiredConns() > 0 }
	for range 1000 {
		if !slices.ContainsFunc(s.instances, working) {
			return
		}
		pause(ctx, 5*time.Millisecond)
	}
}
