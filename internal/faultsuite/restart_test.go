package faultsuite

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

// Promise D8: the whole server is killed under load and comes back. Every other time it is configured not to wait for
// the disk at COMMIT.
func TestFault_KilledServerLosesNothingAcknowledged(t *testing.T) {
	t.Parallel()
	b := newBranch(t, options{})
	runners := []*txn.Runner{b.runner, b.another(t)}
	total := &tally{}
	rounds, keys := scaled(2, 20), scaled(200, 300)
	ctx := t.Context()
	var before *invariant.Snapshot
	for round := range rounds {
		require.NoError(t, b.primary.Set(ctx, "synchronous_commit", []string{"off", "on"}[round%2]))
		killed := b.during(ctx, len(b.all())+rand.IntN(keys), func() error {
			return errors.Join(b.primary.Kill(), b.primary.Start(ctx))
		})
		b.storm(t, runners, names(fmt.Sprintf("r%d-", round), keys))
		require.NoError(t, <-killed)
		require.Eventually(t, func() bool { return b.direct.Ping(ctx) == nil }, 30*time.Second, 10*time.Millisecond)
		total.kills++
		before = b.check(t, &tally{}, (round+1)*keys, before)
	}
	b.check(t, total, rounds*keys, before)
	t.Logf("faults: killed server: %v, calls %d", total, len(b.all()))
}

// The server dies with a COMMIT on its way, and stays dead for as long as the call looks for it.
func TestFault_ServerDeadAtCommit(t *testing.T) {
	t.Parallel()
	b := newBranch(t, options{config: shortCommitTimeout})
	total := &tally{}
	ctx := t.Context()
	n := scaled(1, 3)
	for i := range n {
		for do, replayed := range map[pgproxy.Action]bool{pgproxy.CutBefore: false, pgproxy.CutAfter: true} {
			key := fmt.Sprintf("%s %d", do, i)
			var killErr error
			b.events.on(func(e idempotency.Event) {
				if _, unknown := e.(idempotency.CommitUnknown); unknown {
					killErr = b.primary.Kill() // before anybody can ask
				}
			})
			b.proxy.Next(pgproxy.Rule{Do: do})
			_, err := b.place(ctx, b.runner, key)
			require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
			require.NoError(t, killErr)
			b.events.on(nil)
			_, err = b.place(ctx, b.runner, key)
			require.ErrorIs(t, err, idempotency.ErrRestart, "nobody can know without the server")

			require.NoError(t, b.primary.Start(ctx))
			require.Equal(t, replayed, b.placeUntilFree(t, b.runner, key).Replayed)
			total.cuts, total.kills, total.resolved = total.cuts+1, total.kills+1, total.resolved+1
		}
	}
	require.Zero(t, b.proxy.Stats().Cancels)
	require.Eventually(t, func() bool { return b.direct.Ping(ctx) == nil }, 30*time.Second, 10*time.Millisecond)
	b.check(t, total, 2*n, nil)
	t.Logf("faults: server dead at COMMIT: %v", total)
}
