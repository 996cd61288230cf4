package faultsuite

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

func shortCommitTimeout(c *txn.Config) { c.CommitTimeout = time.Second }

// answer is what a call in another goroutine came to.
type answer struct {
	res txn.Result[order]
	err error
}

// placeHeld begins a call whose COMMIT is held, and returns when the call knows that it is lost.
func (s *shop) placeHeld(t *testing.T, key string, rule pgproxy.Rule) <-chan answer {
	t.Helper()
	lost := make(chan struct{}, 1)
	s.events.on(func(e idempotency.Event) {
		if _, unknown := e.(idempotency.CommitUnknown); unknown {
			lost <- struct{}{}
		}
	})
	s.proxy.Next(rule)
	answers := make(chan answer, 1)
	ctx := t.Context()
	go func() {
		res, err := s.place(ctx, s.runner, key)
		answers <- answer{res, err}
	}()
	select {
	case <-lost:
	case a := <-answers:
		require.FailNow(t, "the call ended without losing its COMMIT", "%v", a.err)
	}
	s.events.on(nil)
	require.Equal(t, 1, s.proxy.Held())
	return answers
}

// A COMMIT may sit on the wire, whole or half, long after its client has given up, and still arrive.
func TestFault_LateCommit(t *testing.T) {
	t.Parallel()
	total := &tally{}
	t.Cleanup(func() { t.Logf("faults: late commits: %v", total) }) // when the parallel ones are done
	for _, do := range []pgproxy.Action{pgproxy.HoldBytes, pgproxy.HalfFlush} {
		for _, arrives := range []bool{true, false} {
			name := string(do) + ", dropped"
			if arrives {
				name = string(do) + ", delivered"
			}
			t.Run(name+" while the call looks for it", func(t *testing.T) {
				t.Parallel()
				s := newShop(t, options{})
				s.events.take()
				call := s.placeHeld(t, "k", pgproxy.Rule{Do: do})
				s.let(t, arrives)
				began := time.Now()
				a := <-call
				took := time.Since(began)
				require.NoError(t, a.err)
				require.False(t, a.res.Replayed)
				require.LessOrEqual(t, took, resolveWithin)
				said := s.events.take()
				require.Equal(t, arrives, only[idempotency.CommitResolved](t, said).Committed)
				require.Equal(t, map[bool]int{true: 1, false: 2}[arrives], only[idempotency.Executed](t, said).Runs)
				s.endLate(t, total, took)
			})
			t.Run(name+" after the call gave up", func(t *testing.T) {
				t.Parallel()
				s := newShop(t, options{wait: 200 * time.Millisecond, config: shortCommitTimeout})
				a := <-s.placeHeld(t, "k", pgproxy.Rule{Do: do})
				require.ErrorIs(t, a.err, idempotency.ErrOutcomeUnknown)
				// The old transaction is open: only its end can tell, so nobody runs meanwhile.
				_, err := s.place(t.Context(), s.runner, "k")
				require.ErrorIs(t, err, idempotency.ErrInProgress)
				s.let(t, arrives)
				began := time.Now()
				res := s.placeUntilFree(t, s.runner, "k")
				took := time.Since(began)
				require.Equal(t, arrives, res.Replayed)
				require.LessOrEqual(t, took, resolveWithin)
				s.endLate(t, total, took)
			})
		}
	}
}

// let delivers what is held, or drops it.
func (s *shop) let(t *testing.T, arrive bool) {
	t.Helper()
	if arrive {
		require.NoError(t, s.proxy.Release(t.Context()))
		return
	}
	s.proxy.Drop()
}

func (s *shop) endLate(t *testing.T, total *tally, took time.Duration) {
	t.Helper()
	require.Zero(t, s.proxy.Stats().Cancels, "it would abort what is delivered late")
	total.add(func() {
		total.cuts, total.resolved, total.slowest = total.cuts+1, total.resolved+1, max(total.slowest, took)
	})
	s.check(t, total, 2, nil)
}

// Promise D3: a transaction whose client is gone without a word ends with the server's timeout, and the key is free.
func TestFault_SilentOwnerEndsWithTheIdleTimeout(t *testing.T) {
	t.Parallel()
	const limit = 500 * time.Millisecond
	s := newShop(t, options{idle: limit.String()})
	s.events.take()
	// Nothing of the last flush arrives: after a part of it the server would wait for the rest, and not be idle.
	call := s.placeHeld(t, "k", pgproxy.Rule{Do: pgproxy.HoldBytes, WholeFlush: true})
	began := time.Now()
	a := <-call
	took := time.Since(began)
	require.NoError(t, a.err)
	require.LessOrEqual(t, took, limit+time.Second)
	said := s.events.take()
	require.False(t, only[idempotency.CommitResolved](t, said).Committed)
	require.Equal(t, 2, only[idempotency.Executed](t, said).Runs)
	require.Error(t, s.proxy.Release(t.Context()), "nobody takes the late COMMIT")
	total := &tally{}
	s.endLate(t, total, took)
	t.Logf("faults: silent owner: %v", total)
}
