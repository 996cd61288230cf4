package devstack

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Standby makes a standby of this server and returns when it follows. It is asynchronous; Set synchronous_standby_names
// to its Name makes it synchronous.
func (n *Node) Standby(ctx context.Context) (*Node, error) {
	s, err := n.cluster.add()
	if err != nil {
		return nil, err
	}
	if err := n.backup(ctx, s); err != nil {
		return nil, err
	}
	if err := s.firstStart(ctx); err != nil {
		return nil, err
	}
	return s, n.Await(ctx, "SELECT state = 'streaming' FROM pg_stat_replication WHERE application_name = "+quote(s.name))
}

func (n *Node) backup(ctx context.Context, to *Node) error {
	real, err := filepath.EvalSymlinks(n.cluster.program)
	if err != nil {
		return fmt.Errorf("devstack: find pg_basebackup: %w", err)
	}
	runtime.LockOSThread() // for the parent-death signal, as in startProcess
	defer runtime.UnlockOSThread()
	from := fmt.Sprintf("host=127.0.0.1 port=%d user=postgres sslmode=disable application_name=%s", n.port, to.name)
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(real), "pg_basebackup"), "--dbname", from,
		"--pgdata", filepath.Join(to.dir, "data"), "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
	cmd.Dir, cmd.Env = to.dir, append(serverEnv(), "PGPASSWORD="+n.cluster.password)
	cmd.SysProcAttr = attributes(n.cluster.as, syscall.SIGKILL)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("devstack: pg_basebackup: %w; it said:\n%s", err, out)
	}
	return nil
}

// CatchUp returns when the standby has applied all that the primary has written by now.
func (n *Node) CatchUp(ctx context.Context, primary *Node) error {
	rows, err := primary.ask(ctx, "SELECT pg_current_wal_flush_lsn()")
	if err != nil {
		return err
	}
	return n.Await(ctx, "SELECT pg_last_wal_replay_lsn() >= "+quote(rows[0][0]))
}

// PauseReceiver stops the standby's receiver with SIGSTOP: what the primary sends now stays in the socket. It is not to
// be woken again: Promote would wait for it, and woken it would read what the socket holds. Kill and Start the standby.
func (n *Node) PauseReceiver(ctx context.Context) error {
	rows, err := n.ask(ctx, "SELECT pid FROM pg_stat_wal_receiver")
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(rows) == 0 || n.process == nil {
		return fmt.Errorf("devstack: pause the receiver of %s: it has none", n.name)
	}
	pid, err := strconv.Atoi(rows[0][0])
	if err == nil {
		var children []int
		if children, err = childrenOf(n.process.cmd.Process.Pid); err == nil && !slices.Contains(children, pid) {
			err = errors.New("it is no process of ours")
		}
	}
	if err == nil {
		err = suspend(pid)
	}
	if err != nil {
		return fmt.Errorf("devstack: pause the receiver of %s: %w", n.name, err)
	}
	return nil
}

// Promote makes a standby a primary and returns when it is one.
func (n *Node) Promote(ctx context.Context) error {
	// It does not wait: its statement could be in the way of what is still to be replayed, which waits for 30 s and then cancels it.
	rows, err := n.ask(ctx, "SELECT pg_promote(false)")
	if err != nil {
		return err
	}
	if rows[0][0] != "t" {
		return fmt.Errorf("devstack: promote %s: the signal to do so could not be sent", n.name)
	}
	return n.Await(ctx, "SELECT NOT pg_is_in_recovery()")
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
