package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const (
	stopGrace  = 10 * time.Second // then SIGKILL
	startGrace = 60 * time.Second
	startPoll  = 20 * time.Millisecond
	portTries  = 8
)

// process is a server we started.
type process struct {
	cmd     *exec.Cmd
	log     string
	stopSig syscall.Signal
	input   *os.File      // if the process ends with its input: stop closes this, and so does our death
	done    chan struct{} // closed when it has exited
}

// startProcess runs a server whose output goes to log.
func startProcess(cmd *exec.Cmd, log string, stopSig syscall.Signal) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("devstack: open log: %w", err)
	}
	defer func() { _ = out.Close() }() // the server has its own descriptor
	cmd.Stderr = out
	if cmd.Stdout == nil {
		cmd.Stdout = out
	}

	p := &process{cmd: cmd, log: log, stopSig: stopSig, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The parent-death signal follows the thread, not the process: this thread must not end before the server.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("devstack: start %s: %w", filepath.Base(cmd.Path), err)
	}
	return p, nil
}

func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *process) stop() error {
	if p.input != nil {
		_ = p.input.Close() // nothing is buffered
	} else {
		_ = p.cmd.Process.Signal(p.stopSig) // an error means it is gone already
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(stopGrace):
	}
	_ = p.cmd.Process.Kill()
	<-p.done
	return fmt.Errorf("devstack: stop %s: killed: it did not stop within %v", filepath.Base(p.cmd.Path), stopGrace)
}

// awaitReady asks ready until it agrees, the server exits, or startGrace is over. The error carries the log's end.
func (p *process) awaitReady(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startGrace)
	defer cancel()
	go func() { // a port's other owner may accept our question and never answer it
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	poll := time.NewTicker(startPoll)
	defer poll.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		if p.exited() {
			return p.failed(errors.New("it exited"))
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			return p.failed(errors.Join(ctx.Err(), err))
		case <-poll.C:
		}
	}
}

func (p *process) failed(err error) error {
	return fmt.Errorf("devstack: start %s: %w; the end of its log:\n%s", filepath.Base(p.cmd.Path), err, tail(p.log))
}

// onFreePort calls start with free ports until the server got the one it was given: between our asking for a port and
// the server's binding it, anybody may take it.
func onFreePort(start func(port int) (*process, error)) (*process, error) {
	var err error
	for range portTries {
		var port int
		if port, err = freePort(); err != nil {
			return nil, err
		}
		var p *process
		if p, err = start(port); err == nil {
			return p, nil
		}
		if p == nil {
			return nil, err
		}
		lost := p.lostPort()
		_ = p.stop() // the error of the start is the one to tell
		if !lost {
			return nil, err
		}
	}
	return nil, err
}

// onOwnPort calls start until the server got the port that it had: somebody's outgoing connection may have taken it, maybe
// for a moment. The process is returned also when it does not get ready.
func onOwnPort(ctx context.Context, start func() (*process, error)) (p *process, err error) {
	for range portTries {
		if p, err = start(); err == nil || p == nil || !p.lostPort() {
			return p, err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return p, errors.Join(err, ctx.Err())
		}
	}
	return p, err
}

// lostPort reports whether the process has ended because somebody else has its port.
func (p *process) lostPort() bool {
	return p.exited() && bytes.Contains(bytes.ToLower([]byte(tail(p.log))), []byte("address already in use"))
}

func freePort() (int, error) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return 0, fmt.Errorf("devstack: find a free port: %w", err)
	}
	defer func() { _ = l.Close() }() // nothing was accepted
	return l.Addr().(*net.TCPAddr).Port, nil
}

// tail is the end of a log, enough to see why a server did not start.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// serverEnv is the whole environment of what we start: nothing of ours (PGPORT, PGDATA, LC_*) may reach it, and
// messages are in English because we look for one of them.
func serverEnv() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
}
