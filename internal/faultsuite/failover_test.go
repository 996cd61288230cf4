package faultsuite

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/txn"
)

// Promise D9: the primary dies under load and its synchronous standby takes over. Every other time the clients are led to
// the standby before it is promoted.
func TestFault_SynchronousFailoverLosesNothingAcknowledged(t *testing.T) {
	t.Parallel()
	b := newBranch(t, options{})
	runners := []*txn.Runner{b.runner, b.another(t)}
	total := &tally{}
	rounds, keys := scaled(1, 5), scaled(200, 600)
	ctx := t.Context()
	var before *invariant.Snapshot
	for round := range rounds {
		standby := b.standby(t)
		b.synchronous(t, standby)
		require.NoError(t, b.primary.Await(ctx, "SELECT sync_state = 'sync' FROM pg_stat_replication"))
		moved := b.during(ctx, len(b.all())+rand.IntN(keys), func() error {
			err := b.primary.Kill()
			if round%2 == 0 {
				return errors.Join(err, b.proxy.Retarget(standby.URL()), standby.Promote(ctx))
			}
			return errors.Join(err, standby.Promote(ctx), b.proxy.Retarget(standby.URL()))
		})
		b.storm(t, runners, names(fmt.Sprintf("r%d-", round), keys))
		require.NoError(t, <-moved)
		b.moveTo(t, standby)
		total.kills++
		before = b.check(t, &tally{}, (round+1)*keys, before)
	}
	b.check(t, total, rounds*keys, before)
	t.Logf("faults: synchronous failover: %v, calls %d", total, len(b.all()))
}
