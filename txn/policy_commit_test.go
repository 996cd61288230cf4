package txn_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Without a record there is no record to look for: the row of the execution tells.
func TestPolicy_LostCommitWithoutARecord(t *testing.T) {
	t.Parallel()
	for _, enforcement := range []string{"off", "shadow"} {
		for _, mode := range []string{"before", "after"} {
			t.Run(enforcement+", cut "+mode, func(t *testing.T) {
				t.Parallel()
				s, c := newCutShop(t)
				p := (&policyShop{shop: s}).withRunner(t)
				p.ok(t, "k") // shadow's first
				p.policy(t, "all", "", enforcement)
				for i := range 20 {
					key := "k"
					if enforcement == "off" {
						key = string(rune('A' + i))
					}
					before := s.orders(t, key)
					c.mode.Store(mode)
					res := p.ok(t, key)
					require.False(t, res.Replayed)
					require.Equal(t, key, res.Value.Key)
					require.NotZero(t, res.Value.ID)
					require.Equal(t, before+1, s.orders(t, key))
				}
				s.requireAllLogged(t)
				// Not all of them: on a new connection the cut may come when COMMIT is prepared.
				unknown := len(eventsOf[idempotency.CommitUnknown](&p.events))
				require.GreaterOrEqual(t, unknown, 5)
				require.Len(t, eventsOf[idempotency.CommitResolved](&p.events), unknown)
				require.Len(t, eventsOf[idempotency.Bypassed](&p.events), 20)
			})
		}
	}
}

// A call beside a running one has no lock. Nobody can prove that its lost COMMIT will not arrive, and nobody says so.
func TestPolicy_LostCommitBesideARunningCall(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"before", "after"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := &cutter{}
			s := newShopWith(t, func(cfg *pgxpool.Config) {
				atLeastConns(4)(cfg)
				c.configure(cfg)
			})
			p := (&policyShop{shop: s}).withRunner(t)
			p.policy(t, "all", "", "shadow")
			outer := newRunner(t, s.pool)
			_, err := txn.WithIdempotency(t.Context(), outer, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
				p.ok(t, "k") //nolint:contextcheck // has COMMIT prepared on the connection that is cut
				c.mode.Store(mode)
				res, err := p.place(t.Context(), request(t, "k", "{}")) //nolint:contextcheck // another caller
				if mode == "after" {
					require.NoError(t, err)
					require.NotZero(t, res.Value.ID)
				} else {
					require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
				}
				return insertOrder(ctx, tx, "k")
			})
			require.NoError(t, err)
			s.requireAllLogged(t)
		})
	}
}

// In a batch each key is looked for by itself.
func TestPolicy_LostCommitOfManyWithoutRecords(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"before", "after"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s, c := newCutShop(t)
			p := (&policyShop{shop: s}).withRunner(t)
			p.policy(t, "all", "", "off")
			keys := []string{"a", "b", "c", "a"}
			reqs := make([]idempotency.Request, len(keys))
			for i, key := range keys {
				reqs[i] = request(t, key, "{}")
			}
			c.mode.Store(mode)
			outcomes, err := txn.WithIdempotencyMany(t.Context(), p.runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (order, error) {
				return insertOrder(ctx, tx, keys[i])
			})
			require.NoError(t, err)
			for i, o := range outcomes {
				require.NoError(t, o.Err)
				require.False(t, o.Replayed)
				require.Equal(t, keys[i], o.Value.Key)
			}
			require.Equal(t, 2, s.orders(t, "a"))
			require.Equal(t, 1, s.orders(t, "b"))
			s.requireAllLogged(t)
		})
	}
}

func TestPolicy_InATransactionOfTheCaller(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "all", "", "off")
	require.NoError(t, p.inTx(t, request(t, "k", "{}"), true))
	require.ErrorIs(t, p.inTx(t, request(t, "k", "{}"), false), idempotency.ErrNotRecorded)
	require.Equal(t, []string{"off RUN SUCCESS"}, p.bypasses(t, "k"), "what the caller rolls back is not logged")
	require.Equal(t, 1, p.orders(t, "k"))
	require.Len(t, eventsOf[idempotency.Bypassed](&p.events), 1)
	p.requireAllLogged(t)
}

// A COMMIT whose answer was lost may arrive between the first look for its row and the key's lock.
func TestPolicy_CommitOfTheCallerArrivesWhileItIsLookedFor(t *testing.T) {
	t.Parallel()
	for _, enforcement := range []string{"off", "shadow", "enforce"} {
		t.Run(enforcement, func(t *testing.T) {
			t.Parallel()
			var until atomic.Int32
			arrive := func() {} // on the connection that is asked for the lock with
			p := (&policyShop{shop: newShopWith(t, func(cfg *pgxpool.Config) {
				atLeastConns(4)(cfg)
				cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					if until.Add(-1) == 0 {
						arrive()
					}
					return true, nil
				}
			})}).withRunner(t)
			if enforcement == "shadow" {
				p.ok(t, "k")
			}
			p.policy(t, "all", "", enforcement)
			tx, err := p.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			joined, err := txn.WithIdempotencyTx(t.Context(), p.runner, tx, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
				return insertOrder(ctx, tx, "k")
			})
			require.NoError(t, err)
			committed := false
			arrive = func() { committed = tx.Commit(context.WithoutCancel(t.Context())) == nil }
			until.Store(2)
			require.NoError(t, joined.AfterCommit(t.Context()))
			require.True(t, committed)
			p.requireAllLogged(t)
		})
	}
}
