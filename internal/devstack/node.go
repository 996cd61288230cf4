package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Node is one server of a Cluster. It keeps its data and its port through every death.
type Node struct {
	cluster *Cluster
	name    string
	dir     string
	port    int

	mu      sync.Mutex
	process *process // nil before its first start
}

// Name is what a standby calls itself at its primary, for synchronous_standby_names.
func (n *Node) Name() string { return n.name }

// URL is the superuser's connection string, to the database postgres.
func (n *Node) URL() string {
	return (&url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", n.cluster.password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port)), Path: "/postgres", RawQuery: "sslmode=disable",
	}).String()
}

func (n *Node) firstStart(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	p, err := onFreePort(func(port int) (*process, error) {
		n.port = port
		return n.run(ctx)
	})
	n.process = p
	return err
}

// Start starts a dead server again and returns when it answers.
func (n *Node) Start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.process != nil && !n.process.exited() {
		return fmt.Errorf("devstack: start %s: it runs already", n.name)
	}
	p, err := onOwnPort(ctx, func() (*process, error) { return n.run(ctx) })
	if p != nil {
		n.process = p
	}
	return err
}

// run starts the server's process. It is returned also when it does not get ready.
func (n *Node) run(ctx context.Context) (*process, error) {
	cmd := postgresCommand(ctx, n.cluster.program, n.dir, n.port, n.cluster.settings)
	cmd.SysProcAttr = attributes(n.cluster.as, syscall.SIGQUIT)
	p, err := startProcess(cmd, filepath.Join(n.dir, "log"), syscall.SIGQUIT)
	if err != nil {
		return nil, err
	}
	err = p.awaitReady(ctx, func(ctx context.Context) error {
		_, err := n.ask(ctx, "SELECT 1")
		return err
	})
	return p, err
}

// Kill ends the server and all its processes with SIGKILL, as a power failure does that the disk survives. It returns
// when none of them is left; a dead server stays dead.
func (n *Node) Kill() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.process == nil || n.process.exited() {
		return nil
	}
	postmaster := n.process.cmd.Process
	// Stopped first: it neither starts another process, nor takes its dead ones' numbers back for others.
	err := suspend(postmaster.Pid)
	children, listErr := childrenOf(postmaster.Pid)
	started := map[int]string{}
	for _, pid := range children {
		if start, err := startOf(pid); err == nil {
			started[pid] = start
			_ = syscall.Kill(pid, syscall.SIGKILL) // an error means that it is gone
		}
	}
	_ = postmaster.Kill() // as above
	<-n.process.done
	for pid, start := range started {
		err = errors.Join(err, await(func() bool {
			now, err := startOf(pid)
			return errors.Is(err, errGone) || err == nil && now != start
		}))
	}
	if err = errors.Join(err, listErr); err != nil {
		return fmt.Errorf("devstack: kill %s: %w", n.name, err)
	}
	return nil
}

// suspend sends SIGSTOP and returns when the process has stopped.
func suspend(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	return await(func() bool { return suspended(pid) })
}

// await bounds what takes the kernel a moment.
func await(done func() bool) error {
	for deadline := time.Now().Add(stopGrace); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("its processes did not do as they were told within %v", stopGrace)
		}
	}
	return nil
}

// Set changes a setting for good (ALTER SYSTEM) and returns when the server goes by it.
func (n *Node) Set(ctx context.Context, name, value string) error {
	if !settingName.MatchString(name) {
		return fmt.Errorf("devstack: set %q: not a setting", name)
	}
	for _, sql := range []string{"ALTER SYSTEM SET " + name + " = " + quote(value), "SELECT pg_reload_conf()"} {
		if _, err := n.ask(ctx, sql); err != nil {
			return err
		}
	}
	if err := n.Await(ctx, "SELECT current_setting("+quote(name)+") = "+quote(value)); err != nil {
		return err
	}
	// New sessions have it. The checkpointer, which tells every commit whether to wait for a standby, reads its
	// configuration before it does what it is asked.
	_, err := n.ask(ctx, "CHECKPOINT")
	return err
}

// Await returns when a query answers true. Errors and no rows are no answer yet.
func (n *Node) Await(ctx context.Context, query string) error {
	ctx, cancel := context.WithTimeout(ctx, startGrace)
	defer cancel()
	poll := time.NewTicker(startPoll)
	defer poll.Stop()
	for {
		rows, err := n.ask(ctx, query)
		if err == nil && len(rows) > 0 && rows[0][0] == "t" {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("devstack: await %s of %s: %w", query, n.name, errors.Join(ctx.Err(), err))
		}
	}
}

func (n *Node) ask(ctx context.Context, sql string) ([][]string, error) {
	return (&Stack{adminURL: n.URL()}).admin(ctx, sql)
}
