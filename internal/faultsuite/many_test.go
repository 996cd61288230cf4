package faultsuite

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

var errRefused = errors.New("refused")

// placeMany places an order for each key, except that one is refused and one fails for good.
func (s *shop) placeMany(ctx context.Context, keys []string, refused, final int) ([]txn.Outcome[order], error) {
	reqs := make([]idempotency.Request, len(keys))
	for i, key := range keys {
		var err error
		if reqs[i], err = request(key); err != nil {
			return nil, err
		}
	}
	outcomes, err := txn.WithIdempotencyMany(ctx, s.runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (order, error) {
		o, err := insertOrder(ctx, tx, keys[i])
		switch {
		case err != nil:
			return o, err
		case i == refused:
			return o, errRefused
		case i == final:
			return order{}, txn.Final("sold_out", errRefused)
		}
		return o, nil
	})
	for i, out := range outcomes {
		if told, known := verdict(keys[i], out.Result, out.Err); known {
			s.tell(told)
		}
	}
	return outcomes, err
}

// shortOfMany is how many bytes of the answers to 19 records, one attempt and COMMIT do not tell yet that COMMIT is done.
const shortOfMany = 1080

// The lost COMMIT of a batch: every key of it gets the outcome that is recorded, and none runs twice.
func TestFault_LostCommitOfMany(t *testing.T) {
	t.Parallel()
	for _, do := range []pgproxy.Action{pgproxy.CutBefore, pgproxy.CutAfter, pgproxy.CutInReply} {
		t.Run(string(do), func(t *testing.T) {
			t.Parallel()
			total := &tally{}
			s := newShop(t, options{})
			size, n := 20, scaled(3, 30)
			for round := range n {
				keys := make([]string, size)
				for i := range keys {
					keys[i] = fmt.Sprintf("r%dk%d", round, i)
				}
				s.events.take()
				s.proxy.Next(pgproxy.Rule{Do: do, Bytes: 1 + round*(shortOfMany-1)/(n-1), Reset: round%2 == 1})
				began := time.Now()
				outcomes, err := s.placeMany(t.Context(), keys, 4, 7)
				took := time.Since(began)
				require.NoError(t, err)
				unknown, committed := 0, 0
				runs := map[string]int{}
				for _, e := range s.events.take() {
					switch e := e.(type) {
					case idempotency.CommitUnknown:
						unknown++
					case idempotency.CommitResolved:
						if e.Committed {
							committed++
						}
					case idempotency.Executed:
						runs[e.Key.Value()] = e.Runs
					}
				}
				require.Equal(t, size-1, unknown)
				want := 1
				if do == pgproxy.CutBefore {
					require.Zero(t, committed)
					want = 2
				} else {
					require.Equal(t, size-1, committed)
				}
				for i, out := range outcomes {
					switch i {
					case 4:
						require.ErrorIs(t, out.Err, errRefused)
						continue
					case 7:
						require.ErrorIs(t, out.Err, idempotency.ErrFailed)
						require.ErrorIs(t, out.Err, errRefused, "its first caller gets the cause")
					default:
						require.NoError(t, out.Err, "%d", i)
						require.Equal(t, keys[i], out.Value.Key)
					}
					require.False(t, out.Replayed)
					require.Equal(t, want, runs[keys[i]])
				}
				total.add(func() {
					total.cuts, total.resolved, total.slowest = total.cuts+1, total.resolved+1, max(total.slowest, took)
				})
			}
			require.Equal(t, int64(n), s.proxy.Stats().Cut)
			s.check(t, total, n*(size-2), nil)
			t.Logf("faults: lost commits of %d keys each: %v", size, total)
		})
	}
}

// While PostgreSQL is away nobody can know of any of the keys, and one CommitTimeout is enough for all of them.
func TestFault_PostgresAwayAtCommitOfMany(t *testing.T) {
	t.Parallel()
	s := newShop(t, options{config: shortCommitTimeout})
	s.events.on(func(e idempotency.Event) {
		if _, unknown := e.(idempotency.CommitUnknown); unknown {
			s.proxy.Down()
		}
	})
	s.proxy.Next(pgproxy.Rule{Do: pgproxy.CutAfter})
	keys := make([]string, 50)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%d", i)
	}
	began := time.Now()
	outcomes, err := s.placeMany(t.Context(), keys, -1, -1)
	require.NoError(t, err)
	require.Less(t, time.Since(began), 10*time.Second)
	for _, out := range outcomes {
		require.ErrorIs(t, out.Err, idempotency.ErrOutcomeUnknown)
	}
	s.events.on(nil)
	s.proxy.Up()
	outcomes, err = s.placeMany(t.Context(), keys, -1, -1)
	require.NoError(t, err)
	for _, out := range outcomes {
		require.NoError(t, out.Err)
		require.True(t, out.Replayed)
	}
	s.check(t, &tally{}, len(keys), nil)
}
