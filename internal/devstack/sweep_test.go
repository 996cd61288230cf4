package devstack

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestKilledParent_TakesTheServerWithIt(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux signals a child when its parent dies; elsewhere the next Start sweeps")
	}
	cmd, dir, _ := startChild(t, "")
	postmaster := postmasterOf(t, dir)
	require.True(t, runsIn(postmaster, dir, "postgres"))
	require.False(t, left(dir), "the owner is alive")

	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool { return !runsIn(postmaster, dir, "postgres") }, 20*time.Second, 20*time.Millisecond)

	require.DirExists(t, dir, "nobody was there to remove it")
	sweepFolders(io.Discard, local().tempDirs())
	require.NoDirExists(t, dir)
}

func TestKilledParent_LeavesADatabaseForTheNextStart(t *testing.T) {
	t.Parallel()
	server := shared(t)
	cmd, _, name := startChild(t, server.adminURL)

	s, err := start(t.Context(), nil, named(server.adminURL))
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	require.Equal(t, []string{name}, existing(t, name), "a live run keeps its database")

	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	s, err = start(t.Context(), nil, named(server.adminURL))
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	require.Empty(t, existing(t, name))
}

func TestSweep_StopsAServerThatStillRuns(t *testing.T) {
	t.Parallel()
	s, err := start(t.Context(), &Config{Settings: fast}, local())
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Stop() })
	postmaster := postmasterOf(t, s.scratch)
	dead, err := thisOwner()
	require.NoError(t, err)
	dead.Start = "1"
	require.NoError(t, os.WriteFile(filepath.Join(s.scratch, ownerFile), []byte(dead.String()), 0o600))

	sweepFolders(io.Discard, local().tempDirs())
	require.NoDirExists(t, s.scratch)
	require.Eventually(t, s.servers[0].exited, 20*time.Second, 20*time.Millisecond)
	require.False(t, runsIn(postmaster, s.scratch, "postgres"))
}

func TestSweep_LeavesAloneWhatIsNotProvablyOurs(t *testing.T) {
	t.Parallel()
	me, err := thisOwner()
	require.NoError(t, err)
	dead, otherBoot := me, me
	dead.Start = "1"
	otherBoot.Start, otherBoot.Boot = "1", "another"
	parent := t.TempDir()
	folder := func(name, owner string) string {
		dir := filepath.Join(parent, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		if owner != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, ownerFile), []byte(owner), 0o600))
		}
		return dir
	}
	kept := []string{
		folder("pgonce-unmarked", ""),
		folder("pgonce-garbled", "1234"),
		folder("pgonce-alive", me.String()),
		folder("pgonce-other-boot", otherBoot.String()),
		folder("other", dead.String()),
	}
	gone := folder("pgonce-dead", dead.String())
	require.NoError(t, os.Symlink(kept[4], filepath.Join(parent, "pgonce-link")))

	// A pid file that names somebody else's process: this test's own.
	require.NoError(t, os.MkdirAll(filepath.Join(gone, "pg", "data"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(gone, "pg", "data", "postmaster.pid"),
		[]byte(strconv.Itoa(os.Getpid())+"\n"), 0o600))

	sweepFolders(io.Discard, []string{parent})
	require.NoDirExists(t, gone)
	for _, dir := range kept {
		require.DirExists(t, dir)
	}
	if os.Geteuid() == 0 {
		theirs := folder("pgonce-theirs", dead.String())
		require.NoError(t, os.Chown(theirs, 65534, 65534))
		sweepFolders(io.Discard, []string{parent})
		require.DirExists(t, theirs, "anybody can make a folder in /tmp")
	}
}

// startChild runs this test binary as a program that starts a stack, and returns where it is.
func startChild(t *testing.T, url string, env ...string) (cmd *exec.Cmd, dir, database string) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), childVariable+"=1", envDatabase+"="+url), env...)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe() // stays open: the child waits on it
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	dir, database, _ = strings.Cut(strings.TrimSpace(line), " ")
	require.NotEqual(t, "failed:", dir, database)
	return cmd, dir, database
}

func postmasterOf(t *testing.T, dir string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "pg", "data", "postmaster.pid"))
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(line)
	require.NoError(t, err)
	return pid
}
