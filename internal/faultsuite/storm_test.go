package faultsuite

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// storm places orders of all keys, each by two clients of two processes, until every client has an answer that counts.
// It returns how long that took.
func (s *shop) storm(t *testing.T, runners []*txn.Runner, keys []string) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	work := make(chan string)
	var clients sync.WaitGroup
	errs := make([]error, 8)
	began := time.Now()
	for i := range errs {
		clients.Go(func() {
			for key := range work {
				if errs[i] == nil { // the others go on, so that the sender does
					errs[i] = s.insist(ctx, runners[i%len(runners)], key)
				}
			}
		})
	}
	for _, key := range keys {
		work <- key
		work <- key
	}
	close(work)
	clients.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	return time.Since(began)
}

// insist calls until an order is placed, as a client does that was told to retry.
func (s *shop) insist(ctx context.Context, r *txn.Runner, key string) error {
	for {
		res, err := s.place(ctx, r, key)
		if err == nil {
			return nil
		}
		if _, known := verdict(key, res, err); !known || ctx.Err() != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
}

// disturb does something again and again until the test says stop, and returns how often it did.
func disturb(every time.Duration, do func() int) (stop func() int) {
	done, over := make(chan struct{}), make(chan struct{})
	n := 0
	go func() {
		defer close(over)
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				n += do()
			case <-done:
				return
			}
		}
	}()
	return func() int {
		close(done)
		<-over
		return n
	}
}

func names(prefix string, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return keys
}

// Backends are terminated and COMMITs are lost at random, while two processes place the same orders.
func TestFault_StormOfKilledBackendsAndLostCommits(t *testing.T) {
	t.Parallel()
	s := newShop(t, options{})
	// Both through the proxy: one past it is faster, and would win nearly every key.
	runners := []*txn.Runner{s.runner, s.anotherAt(t, s.proxy.URL(pgtest.ServiceURL(t, s.direct.Config().ConnString())))}
	total := &tally{}
	s.proxy.Decide(func(c pgproxy.Commit) pgproxy.Rule {
		if rand.IntN(10) > 0 {
			return pgproxy.Rule{}
		}
		// Not HoldBytes, which would keep its key until the idle timeout.
		actions := []pgproxy.Action{pgproxy.CutBefore, pgproxy.CutAfter, pgproxy.CutInReply}
		return pgproxy.Rule{Do: actions[rand.IntN(len(actions))], Reset: rand.IntN(2) == 0}
	})
	before, err := invariant.Take(t.Context(), s.direct, create.Name)
	require.NoError(t, err)
	ctx := context.WithoutCancel(t.Context()) // a failing storm stops it too, at its end
	answers := 0
	stop := disturb(5*time.Millisecond, func() (killed int) {
		// By progress and not by time: on a slow machine nobody would get through.
		if len(s.all()) < answers+10 {
			return 0
		}
		answers = len(s.all())
		// The error of a kill that came too late shows as a kill less.
		_ = s.direct.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'shop' ORDER BY random() LIMIT 1) AS one`).Scan(&killed)
		return killed
	})
	defer func() {
		if stop != nil {
			stop()
		}
	}()
	n := scaled(200, 2000)
	took := s.storm(t, runners, names("k", n))
	kills := stop()
	stop = nil
	require.Positive(t, kills)
	require.Positive(t, s.proxy.Stats().Cut)
	total.kills, total.cuts = kills, int(s.proxy.Stats().Cut)
	for _, e := range s.events.take() {
		if resolved, ok := e.(idempotency.CommitResolved); ok { // also of COMMITs that a kill has met
			total.resolved, total.slowest = total.resolved+1, max(total.slowest, resolved.Duration)
		}
	}
	s.check(t, total, n, before)
	t.Logf("faults: storm: %v, calls %d in %v", total, len(s.all()), took.Round(time.Millisecond))
}

// Promise D10: a client that hangs up at any moment leaves no connection behind, and no half of an order.
func TestFault_ClientsHangUp(t *testing.T) {
	t.Parallel()
	s := newShop(t, options{})
	total := &tally{}
	n := scaled(200, 2000)
	var clients sync.WaitGroup
	var lately atomic.Int64 // how long a patient client's order took, on this machine and under this load
	lately.Store(int64(10 * time.Millisecond))
	work := make(chan string)
	for i := range 8 {
		patient := i%2 == 0
		clients.Go(func() {
			for key := range work {
				patience := rand.N(200 * time.Millisecond)
				if !patient { // hangs up in the middle, however fast the machine is
					patience = rand.N(2 * time.Duration(lately.Load()))
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				began := time.Now()
				_, err := s.place(ctx, s.runner, key) // whatever it is told is checked against the database
				if patient && err == nil {
					lately.Store(int64(time.Since(began)))
				}
				cancel()
			}
		})
	}
	for _, key := range names("k", n) {
		work <- key
	}
	close(work)
	clients.Wait()
	gaveUp := 0
	for _, told := range s.all() {
		if told.Outcome != invariant.Succeeded {
			gaveUp++
		}
	}
	require.Greater(t, gaveUp, n/10)
	s.storm(t, []*txn.Runner{s.runner, s.another(t)}, names("k", n))
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 5*time.Second, 10*time.Millisecond)
	s.check(t, total, n, nil)
	t.Logf("faults: clients hang up: %v, gave up %d", total, gaveUp)
}
