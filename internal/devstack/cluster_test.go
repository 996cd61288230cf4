package devstack

import (
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func newCluster(t *testing.T) *Cluster {
	t.Helper()
	c, err := startCluster(t.Context(), &Config{Settings: fast}, local())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	return c
}

func TestCluster_KilledServerComesBackWithWhatWasCommitted(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	primary := c.Primary()
	query(t, primary.URL(), "CREATE TABLE orders AS SELECT 1 AS id")
	conn, err := pgx.Connect(t.Context(), primary.URL())
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	children, err := childrenOf(primary.process.cmd.Process.Pid)
	require.NoError(t, err)
	require.Contains(t, children, int(conn.PgConn().PID()))

	require.NoError(t, primary.Kill())
	require.NoError(t, primary.Kill(), "a dead server stays dead")
	for _, pid := range children {
		_, err := startOf(pid)
		require.ErrorIs(t, err, errGone)
	}
	require.Error(t, conn.Ping(t.Context()))

	require.NoError(t, primary.Start(t.Context()))
	require.ErrorContains(t, primary.Start(t.Context()), "it runs already")
	require.Equal(t, [][]string{{"1"}}, query(t, primary.URL(), "SELECT id::text FROM orders"))
	require.NoError(t, primary.Set(t.Context(), "synchronous_commit", "off"))
	require.Equal(t, [][]string{{"off"}}, query(t, primary.URL(), "SHOW synchronous_commit"))

	require.NoError(t, c.Stop())
	require.NoError(t, c.Stop())
	require.NoDirExists(t, c.scratch)
}

func TestCluster_StandbyTakesOverWithoutWhatItsPausedReceiverMissed(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := newCluster(t)
	primary := c.Primary()
	query(t, primary.URL(), "CREATE TABLE orders (id int)")
	standby, err := primary.Standby(ctx)
	require.NoError(t, err)
	require.NoError(t, primary.Set(ctx, "synchronous_standby_names", standby.Name()))
	require.NoError(t, primary.Await(ctx, "SELECT sync_state = 'sync' FROM pg_stat_replication"))
	query(t, primary.URL(), "INSERT INTO orders VALUES (1)")
	require.NoError(t, standby.CatchUp(ctx, primary))
	require.Equal(t, [][]string{{"1"}}, query(t, standby.URL(), "SELECT id::text FROM orders"))

	require.NoError(t, primary.Set(ctx, "synchronous_standby_names", ""))
	require.NoError(t, standby.PauseReceiver(ctx))
	query(t, primary.URL(), "INSERT INTO orders VALUES (2)")
	require.NoError(t, primary.Kill())
	require.NoError(t, standby.Kill())
	require.NoError(t, standby.Start(ctx))
	require.NoError(t, standby.Promote(ctx))
	query(t, standby.URL(), "INSERT INTO orders VALUES (3)")
	require.Equal(t, [][]string{{"1"}, {"3"}}, query(t, standby.URL(), "SELECT id::text FROM orders ORDER BY id"))
}

// What is still to be replayed takes away rows that a statement begun before may see.
func TestCluster_PromotionIsNotInItsOwnWay(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	primary := newCluster(t).Primary()
	query(t, primary.URL(), "CREATE TABLE orders AS SELECT 1 AS id")
	standby, err := primary.Standby(ctx)
	require.NoError(t, err)
	require.NoError(t, standby.CatchUp(ctx, primary))
	query(t, standby.URL(), "SELECT pg_wal_replay_pause()")
	require.NoError(t, standby.Await(ctx, "SELECT pg_get_wal_replay_pause_state() = 'paused'"))
	query(t, primary.URL(), "DELETE FROM orders")
	query(t, primary.URL(), "VACUUM orders")
	now := query(t, primary.URL(), "SELECT pg_current_wal_lsn()::text")[0][0]
	require.NoError(t, standby.Await(ctx, "SELECT pg_last_wal_receive_lsn() >= '"+now+"'"))
	require.NoError(t, standby.Promote(ctx))
	require.Empty(t, query(t, standby.URL(), "SELECT id::text FROM orders"))
}

func TestCluster_KilledParentTakesItWithIt(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux signals a child when its parent dies; elsewhere the next Start sweeps")
	}
	cmd, dir, _ := startChild(t, childOfCluster)
	require.NotEmpty(t, runningIn(t, dir))
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	// Its standby's receiver does not hear of a shutdown: the postmaster kills it after 5 s.
	require.Eventually(t, func() bool { return len(runningIn(t, dir)) == 0 }, 20*time.Second, 20*time.Millisecond)
	sweepFolders(io.Discard, local().tempDirs())
	require.NoDirExists(t, dir)
}

// The next start does not wait, and another one may be sweeping already: nobody may kill a server before it has killed its own.
func TestCluster_SweepLeavesNoStoppedProcessBehind(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux signals a child when its parent dies; elsewhere the next Start sweeps")
	}
	cmd, dir, _ := startChild(t, childOfCluster)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	sweepFolders(io.Discard, local().tempDirs())
	require.NoDirExists(t, dir)
	require.Eventually(t, func() bool { return len(runningIn(t, dir)) == 0 }, 20*time.Second, 20*time.Millisecond)
}

func TestCluster_SweepStopsItsServers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	_, err := c.Primary().Standby(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, runningIn(t, c.scratch))
	dead, err := thisOwner()
	require.NoError(t, err)
	dead.Start = "1"
	require.NoError(t, os.WriteFile(filepath.Join(c.scratch, ownerFile), []byte(dead.String()), 0o600))
	sweepFolders(io.Discard, local().tempDirs())
	require.NoDirExists(t, c.scratch)
	require.Eventually(t, func() bool { return len(runningIn(t, c.scratch)) == 0 }, 20*time.Second, 20*time.Millisecond)
}

// runningIn lists the server processes that work in the folder.
func runningIn(t *testing.T, dir string) (pids []int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(t, err)
	for _, proc := range all {
		pid, err := strconv.Atoi(filepath.Base(proc))
		require.NoError(t, err)
		if runsIn(pid, dir, "postgres") {
			pids = append(pids, pid)
		}
	}
	return pids
}
