package txn_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// requireAllLogged: what was done with a key is its record, if it has one, and its executions without a record: exactly.
func (s *shop) requireAllLogged(t testing.TB) {
	t.Helper()
	rows, err := s.direct.Query(context.WithoutCancel(t.Context()), `
		SELECT key || ': ' || orders || ' orders, ' || records || ' records, ' || bypasses || ' bypasses' FROM (
			SELECT COALESCE(o.key, r.key, b.key) AS key, COALESCE(o.n, 0) AS orders, COALESCE(r.n, 0) AS records, COALESCE(b.n, 0) AS bypasses
			FROM (SELECT key COLLATE "C" AS key, count(*) AS n FROM orders GROUP BY 1) AS o
			FULL JOIN (SELECT key::text AS key, count(*) AS n FROM idempotency.records WHERE state = 'SUCCESS' GROUP BY 1) AS r ON r.key = o.key
			FULL JOIN (SELECT key::text AS key, count(*) AS n FROM idempotency.bypasses WHERE outcome = 'SUCCESS' GROUP BY 1) AS b
				ON b.key = COALESCE(o.key, r.key)) AS all_keys
		WHERE orders <> records + bypasses ORDER BY 1`)
	require.NoError(t, err)
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, wrong)
}

// two are two processes of one service, each reading policies by itself.
func two(t *testing.T, config ...func(*txn.Config)) [2]*policyShop {
	t.Helper()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = max(c.MaxConns, 12) })
	return [2]*policyShop{(&policyShop{shop: s}).withRunner(t, config...), (&policyShop{shop: &shop{pool: s.pool, direct: s.direct}}).withRunner(t, config...)}
}

// Policies change all the time, and no process reads them when the other does.
func TestPolicy_RaceOfSwitchesAndCalls(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			processes := two(t, func(c *txn.Config) { c.Isolation, c.MaxRetries = level, 50 })
			s := processes[0].shop
			ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
			defer stop()
			var switches sync.WaitGroup
			switches.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					writePolicy(t, s, "operation", "order.create", []string{"off", "shadow", "enforce"}[i%3]) //nolint:contextcheck // finished although the others are
					for range rand.N(4) {
						_, err := processes[rand.N(2)].policies.RunOnce(context.WithoutCancel(t.Context())) //nolint:contextcheck // the same
						require.NoError(t, err)
					}
				}
			})
			const keys, callers, calls = 400, 6, 150
			var told atomic.Int64
			logged := func() int {
				return len(eventsOf[idempotency.Bypassed](&processes[0].events)) + len(eventsOf[idempotency.Bypassed](&processes[1].events))
			}
			var group sync.WaitGroup
			for caller := range callers {
				group.Go(func() {
					// More of them where the switches came too late to meet any.
					for n := 0; n < calls || n < 20*calls && (told.Load() == 0 || logged() == 0); n++ {
						p, key := processes[caller%2], fmt.Sprint("k", rand.N(keys))
						var err error
						switch rand.N(4) {
						case 0:
							err = p.inTx(t, request(t, key, "{}"), rand.N(4) > 0)
						case 1:
							var outcomes []txn.Outcome[order]
							req := request(t, key, "{}")
							outcomes, err = txn.WithIdempotencyMany(t.Context(), p.runner, []idempotency.Request{req, req},
								func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, key) })
							for _, o := range outcomes {
								if o.Err == nil && !o.Replayed {
									told.Add(1)
								}
							}
						default:
							var res txn.Result[order]
							if res, err = p.place(t.Context(), request(t, key, "{}")); err == nil && !res.Replayed {
								told.Add(1)
							}
						}
						_ = err // in progress, done without a record, an outer transaction to restart: whatever it is, it is counted below
					}
				})
			}
			group.Wait()
			stop()
			switches.Wait()
			s.requireAllLogged(t)

			// Once every process enforces, nothing is done twice any more.
			writePolicy(t, s, "operation", "order.create", "enforce")
			for _, p := range processes {
				_, err := p.policies.RunOnce(t.Context())
				require.NoError(t, err)
			}
			for i := range keys {
				key := fmt.Sprint("k", i)
				before := max(s.orders(t, key), 1)
				for _, p := range processes {
					if _, err := p.place(t.Context(), request(t, key, "{}")); err != nil {
						require.ErrorIs(t, err, idempotency.ErrResultExpired)
					}
				}
				require.Equal(t, before, s.orders(t, key), key)
			}
			s.requireAllLogged(t)
			require.Positive(t, told.Load())
			require.Positive(t, logged())
			t.Logf("%d executions told, %d of them without a record", told.Load(), logged())
		})
	}
}

// A process that runs obeys a change, also the first one, and tells of it.
func TestPolicy_IsReadWhileRunning(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	var err error
	p.policies, err = idempotency.NewPolicies(p.pool, &idempotency.PoliciesConfig{Interval: 100 * time.Millisecond, OnEvent: p.add})
	require.NoError(t, err)
	p.runner = newRunner(t, p.pool, func(c *txn.Config) { c.Policies = p.policies })
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { p.policies.Run(ctx) })
	defer group.Wait()
	defer stop()
	obeys := func(want idempotency.Enforcement) {
		require.Eventually(t, func() bool { return p.policies.For(request(t, "k", "{}").Key).Enforcement == want }, 30*time.Second, 10*time.Millisecond)
	}
	for _, enforcement := range []string{"off", "shadow", "enforce", "off"} {
		writePolicy(t, p.shop, "all", "", enforcement)
		obeys(idempotency.Enforcement(enforcement))
	}
	p.ok(t, "k")
	require.Equal(t, []string{"off RUN SUCCESS"}, p.bypasses(t, "k"))
	p.exec(t, `DELETE FROM idempotency.policies`)
	obeys(idempotency.EnforcementEnforce)
	require.Eventually(t, func() bool { return len(eventsOf[idempotency.PolicyChanged](&p.events)) == 5 }, 30*time.Second, 10*time.Millisecond)
	told := eventsOf[idempotency.PolicyChanged](&p.events)
	require.True(t, told[4].Removed)
}

// A call keeps the policy it began with, over all its runs.
func TestPolicy_ACallKeepsWhatItBeganWith(t *testing.T) {
	t.Parallel()
	for from, to := range map[string]string{"off": "enforce", "enforce": "off", "shadow": "enforce"} {
		t.Run(from+" to "+to, func(t *testing.T) {
			t.Parallel()
			p := newPolicyShop(t)
			p.policy(t, "all", "", "shadow")
			if from == "shadow" {
				p.ok(t, "k") // what comes is not the first
			}
			p.policy(t, "all", "", from)
			runs := 0
			_, err := txn.WithIdempotency(t.Context(), p.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
				if runs++; runs < 3 {
					p.policy(t, "all", "", to) //nolint:contextcheck // an operator
					return order{}, idempotency.ErrRestart
				}
				return insertOrder(ctx, tx, "k")
			})
			require.NoError(t, err)
			require.Equal(t, 3, runs)
			logged := map[string][]string{"off": {"off RUN SUCCESS"}, "enforce": {}, "shadow": {"shadow REPLAY SUCCESS"}}[from]
			require.Equal(t, logged, p.bypasses(t, "k"))
			p.requireAllLogged(t)
		})
	}
}
