package faultsuite

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// obedient is a process that places orders, and obeys policies, until it is killed.
var obedient = childtest.Register("obedient", func(ctx context.Context, url string, tell func(string)) error {
	pool, err := connect(ctx, url, options{})
	if err != nil {
		return err
	}
	policies, err := idempotency.NewPolicies(pool, &idempotency.PoliciesConfig{Interval: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	if _, err := policies.RunOnce(ctx); err != nil {
		return err
	}
	go policies.Run(ctx)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}, Policies: policies})
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for {
				key := fmt.Sprint("k", rand.IntN(200))
				req, err := request(key)
				if err != nil {
					tell("error " + err.Error())
					return
				}
				res, err := txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) { return insertOrder(ctx, tx, key) })
				switch {
				case err == nil && res.Replayed:
				case err == nil:
					tell("executed " + key)
				default:
					tell("refused")
				}
			}
		})
	}
	group.Wait()
	return nil
})

// Processes are killed while policies change: an execution without a record is logged with its business rows, or neither is there.
func TestFault_KilledUnderPolicies(t *testing.T) {
	t.Parallel()
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`)
	require.NoError(t, err)
	url, executed := direct.Config().ConnString(), map[string]int{}
	for round := range scaled(6, 60) {
		_, err := direct.Exec(t.Context(), `INSERT INTO idempotency.policies (scope, enforcement, actor, reason) VALUES ('all', $1, 'ada', 'x')
			ON CONFLICT (scope, name) DO UPDATE SET enforcement = EXCLUDED.enforcement, actor = EXCLUDED.actor, reason = EXCLUDED.reason`, []string{"off", "shadow", "off", "enforce", "shadow", "off"}[round%6])
		require.NoError(t, err)
		child := obedient.Start(t, url)
		seen := 0
		child.Await(t, func(string) bool { seen++; return seen > 30+rand.IntN(100) })
		child.Kill(t)
		for _, fact := range child.Facts() {
			var key string
			if n, _ := fmt.Sscanf(fact, "executed %s", &key); n == 1 {
				executed[key]++
			}
		}
	}
	awaitGone(t, direct)
	rows, err := direct.Query(t.Context(), `
		SELECT k.key::text, (SELECT count(*) FROM orders AS o WHERE o.key = k.key::text),
		       (SELECT count(*) FROM idempotency.records AS r WHERE r.key = k.key AND r.state = 'SUCCESS')
		       + (SELECT count(*) FROM idempotency.bypasses AS b WHERE b.key = k.key AND b.outcome = 'SUCCESS')
		FROM (SELECT key COLLATE "C" AS key FROM orders UNION SELECT key FROM idempotency.records UNION SELECT key FROM idempotency.bypasses) AS k`)
	require.NoError(t, err)
	defer rows.Close()
	keys, total := 0, 0
	for rows.Next() {
		var key string
		var orders, known int
		require.NoError(t, rows.Scan(&key, &orders, &known))
		require.Equal(t, known, orders, key)
		require.GreaterOrEqual(t, orders, executed[key], "%s: told, and not there", key)
		keys, total = keys+1, total+orders
	}
	require.NoError(t, rows.Err())
	require.Greater(t, keys, 50)
	t.Logf("faults: killed under policies: keys %d, executions %d", keys, total)
}
