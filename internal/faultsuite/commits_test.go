package faultsuite

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgproxy"
)

// resolveWithin bounds how long a call takes from the cut to its answer.
const resolveWithin = 2 * time.Second

// Promise D5: a lost COMMIT is resolved while PostgreSQL can be reached, whichever side of it was lost.
func TestFault_LostCommitIsResolved(t *testing.T) {
	t.Parallel()
	total := &tally{}
	t.Cleanup(func() { t.Logf("faults: lost commits: %v", total) }) // when the parallel ones are done
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
		for _, do := range []pgproxy.Action{pgproxy.CutBefore, pgproxy.CutAfter, pgproxy.CutInReply} {
			t.Run(fmt.Sprintf("%s, %v", do, mode), func(t *testing.T) {
				t.Parallel()
				cutCommits(t, total, mode, do)
			})
		}
	}
}

// short is how many bytes of the answers to record and COMMIT do not tell yet that COMMIT is done: all but the last of its
// tag. The record's answer is among them, so that some of the cuts are between the two.
var short = map[pgx.QueryExecMode]int{pgx.QueryExecModeCacheStatement: 72, pgx.QueryExecModeExec: 186}

func cutCommits(t *testing.T, total *tally, mode pgx.QueryExecMode, do pgproxy.Action) {
	t.Helper()
	s := newShop(t, options{mode: mode})
	other := s.another(t)
	var cut atomic.Pointer[time.Time]
	var next atomic.Pointer[pgproxy.Rule]
	s.proxy.Decide(func(c pgproxy.Commit) pgproxy.Rule {
		if c.Simple { // the resolver's own
			return pgproxy.Rule{}
		}
		rule := next.Swap(nil)
		if rule == nil {
			return pgproxy.Rule{}
		}
		now := time.Now()
		cut.Store(&now)
		return *rule
	})
	n := scaled(10, 100)
	for i := range n {
		key := fmt.Sprintf("k%d", i)
		s.events.take()
		next.Store(&pgproxy.Rule{Do: do, Bytes: 1 + i*(short[mode]-1)/(n-1), Reset: i%2 == 1})
		res, err := s.place(t.Context(), s.runner, key)
		took := time.Since(*cut.Load())
		require.Nil(t, next.Load(), "the rule has met its COMMIT")
		require.NoError(t, err)
		require.False(t, res.Replayed)

		said := s.events.take()
		only[idempotency.CommitUnknown](t, said)
		resolved := only[idempotency.CommitResolved](t, said)
		executed := only[idempotency.Executed](t, said)
		if do == pgproxy.CutBefore {
			require.False(t, resolved.Committed)
			require.Equal(t, 2, executed.Runs)
		} else {
			require.True(t, resolved.Committed)
			require.Equal(t, 1, executed.Runs, "what has committed is never run again")
		}
		require.LessOrEqual(t, took, resolveWithin)
		total.add(func() {
			total.cuts, total.resolved, total.slowest = total.cuts+1, total.resolved+1, max(total.slowest, took)
		})

		again, err := s.place(t.Context(), other, key)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, res.Value, again.Value)
	}
	stats := s.proxy.Stats()
	require.Equal(t, int64(n), stats.Cut)
	require.Zero(t, stats.Cancels, "a cancel request would end a COMMIT's wait for its standby")
	s.check(t, total, n, nil)
}

// While PostgreSQL is away nobody can know. The retry does, as soon as it is back.
func TestFault_PostgresAwayAtCommit(t *testing.T) {
	t.Parallel()
	total := &tally{}
	t.Cleanup(func() { t.Logf("faults: PostgreSQL away: %v", total) }) // when the parallel ones are done
	for do, replayed := range map[pgproxy.Action]bool{pgproxy.CutBefore: false, pgproxy.CutAfter: true, pgproxy.CutInReply: true} {
		t.Run(string(do), func(t *testing.T) {
			t.Parallel()
			s := newShop(t, options{config: shortCommitTimeout})
			n := scaled(1, 5)
			for i := range n {
				key := fmt.Sprintf("k%d", i)
				s.events.on(func(e idempotency.Event) {
					if _, unknown := e.(idempotency.CommitUnknown); unknown {
						s.proxy.Down() // before anybody can ask
					}
				})
				s.proxy.Next(pgproxy.Rule{Do: do})
				began := time.Now()
				_, err := s.place(t.Context(), s.runner, key)
				require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
				require.Less(t, time.Since(began), 5*time.Second, "CommitTimeout bounds the search")

				s.events.on(nil)
				s.proxy.Up()
				back := time.Now()
				res := s.placeUntilFree(t, s.runner, key)
				require.Equal(t, replayed, res.Replayed)
				took := time.Since(back)
				require.LessOrEqual(t, took, resolveWithin)
				total.add(func() {
					total.cuts, total.resolved, total.slowest = total.cuts+1, total.resolved+1, max(total.slowest, took)
				})
			}
			require.Zero(t, s.proxy.Stats().Cancels)
			s.check(t, total, n, nil)
		})
	}
}
