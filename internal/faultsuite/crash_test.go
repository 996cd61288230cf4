package faultsuite

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// Promise D8: SIGKILL of one backend makes PostgreSQL throw out everybody and recover from its log. It runs before the
// parallel tests, which share the server.
func TestFault_ServerCrashLosesNothingAcknowledged(t *testing.T) {
	if !pgtest.Server(t).OwnProcesses() {
		t.Skip("the server's processes are not ours to kill")
	}
	s := newShop(t, options{})
	runners := []*txn.Runner{s.runner, s.another(t)}
	total := &tally{}
	rounds, keys := scaled(1, 20), 300
	for round := range rounds {
		witness, err := s.direct.Acquire(t.Context())
		require.NoError(t, err)
		crashed, ctx, at := make(chan error, 1), t.Context(), len(s.all())+rand.IntN(keys/3)
		go func() {
			for len(s.all()) < at { // early in the storm, which goes on meanwhile
				time.Sleep(time.Millisecond)
			}
			crashed <- crash(ctx, witness)
		}()
		s.storm(t, runners, names(fmt.Sprintf("r%d-", round), keys))
		require.NoError(t, <-crashed)
		require.Eventually(t, func() bool { return witness.Ping(ctx) != nil }, 10*time.Second, 10*time.Millisecond,
			"everybody's session ends, also this one")
		witness.Release()
		require.Eventually(t, func() bool { return s.direct.Ping(ctx) == nil }, 30*time.Second, 10*time.Millisecond)
		total.kills++
	}
	s.check(t, total, rounds*keys, nil)
	t.Logf("faults: server crash: %v, calls %d", total, len(s.all()))
}

// crash kills a backend that works for the shop. db has a connection already: none may be had in time.
func crash(ctx context.Context, db *pgxpool.Conn) error {
	var pid int
	err := db.QueryRow(ctx, `SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'shop' ORDER BY state = 'idle', random() LIMIT 1`).Scan(&pid)
	if err != nil {
		return err
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	return process.Signal(syscall.SIGKILL)
}
