package childtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Grace bounds every wait for a child. It is long: a child that hangs has failed the test.
const Grace = 60 * time.Second

// ErrKilled is what Wait returns for a child that died of SIGKILL.
var ErrKilled = errors.New("childtest: killed")

// Process is a child.
type Process[F any] struct {
	entry string
	cmd   *exec.Cmd
	err   error         // valid when ended is closed
	ended chan struct{} // closed when the child is dead and all it told is known

	mu     sync.Mutex
	facts  []F
	bad    error
	news   chan struct{} // closed, and replaced, with every fact
	output bytes.Buffer
}

// Start starts a child with these arguments, and env added to this process's environment. The child is killed when the
// test ends, and when this process dies in any way (on Linux). Its output is logged if the test fails; a data race that
// the child reports fails the test.
func (e Entry[A, F]) Start(t testing.TB, args A, env ...string) *Process[F] {
	t.Helper()
	p, err := start[F](t.Context(), e.name, args, env)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cleanUp(t) })
	return p
}

func start[F any](ctx context.Context, entry string, args any, env []string) (*Process[F], error) {
	input, err := json.Marshal(args)
	if err != nil {
		return nil, fmt.Errorf("childtest: write arguments of %s: %w", entry, err)
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("childtest: find this program: %w", err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("childtest: make a pipe: %w", err)
	}
	p := &Process[F]{entry: entry, ended: make(chan struct{}), news: make(chan struct{})}
	// Not the test's context, which ends before the test's clean-up looks at the child.
	p.cmd = exec.CommandContext(context.WithoutCancel(ctx), program)
	p.cmd.Env = append(append(os.Environ(), variable+"="+entry), env...)
	p.cmd.Stdin = bytes.NewReader(input)
	p.cmd.Stdout, p.cmd.Stderr = (*output[F])(p), (*output[F])(p)
	p.cmd.ExtraFiles = []*os.File{write}
	p.cmd.SysProcAttr = attributes()
	// A grandchild may keep the output open; it does not keep us.
	p.cmd.WaitDelay = time.Second

	started := make(chan error, 1)
	go func() {
		// The parent-death signal follows the thread, not the process: this thread must not end before the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		_ = write.Close() // the child has its own
		started <- err
		if err != nil {
			_ = read.Close()
			return
		}
		var reading sync.WaitGroup
		reading.Go(func() { p.read(read) })
		err = p.cmd.Wait()
		reading.Wait()
		p.err = p.verdict(err)
		close(p.ended)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("childtest: start %s: %w", entry, err)
	}
	return p, nil
}

// read takes facts until the child's end of the pipe is closed. A last line without its end was not acknowledged: tell
// had not returned.
func (p *Process[F]) read(pipe *os.File) {
	defer func() { _ = pipe.Close() }() // nothing was written
	lines := bufio.NewReader(pipe)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			if !errors.Is(err, io.EOF) {
				p.note(func() { p.bad = err })
			}
			return
		}
		var fact F
		err = json.Unmarshal(line, &fact)
		p.note(func() {
			if err != nil {
				p.bad = fmt.Errorf("childtest: read fact %q: %w", line, err)
			} else {
				p.facts = append(p.facts, fact)
			}
		})
	}
}

func (p *Process[F]) note(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	close(p.news)
	p.news = make(chan struct{})
}

// output collects what the child prints.
type output[F any] Process[F]

func (o *output[F]) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.output.Write(b)
}

// Output returns what the child has printed so far.
func (p *Process[F]) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.String()
}

func (p *Process[F]) verdict(err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bad != nil {
		return p.bad
	}
	if err == nil {
		return nil
	}
	if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
		return fmt.Errorf("%w: %s", ErrKilled, p.entry)
	}
	return fmt.Errorf("childtest: %s: %w: %s", p.entry, err, bytes.TrimSpace(p.output.Bytes()))
}

// PID is the child's process id.
func (p *Process[F]) PID() int { return p.cmd.Process.Pid }

// Facts returns what the child has told so far; after Kill or Wait, all it ever told.
func (p *Process[F]) Facts() []F {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]F(nil), p.facts...)
}

// Await returns the first fact that match accepts, when the child has told it. It fails the test if the child ends
// without doing so.
func (p *Process[F]) Await(t testing.TB, match func(F) bool) F {
	t.Helper()
	timeout := time.NewTimer(Grace)
	defer timeout.Stop()
	for next := 0; ; {
		p.mu.Lock()
		fresh, news := p.facts[next:], p.news
		p.mu.Unlock()
		for _, fact := range fresh {
			if match(fact) {
				return fact
			}
		}
		if next += len(fresh); len(fresh) > 0 {
			continue
		}
		select {
		case <-news:
		case <-p.ended:
			if len(p.Facts()) == next {
				t.Fatalf("childtest: %s ended without telling it: %v", p.entry, p.err)
			}
		case <-timeout.C:
			t.Fatalf("childtest: %s did not tell it within %v", p.entry, Grace)
		}
	}
}

// Wait waits for the child's end and returns nil if its entry returned nil, ErrKilled if it died of SIGKILL, and else an
// error with its output.
func (p *Process[F]) Wait(t testing.TB) error {
	t.Helper()
	timeout := time.NewTimer(Grace)
	defer timeout.Stop()
	select {
	case <-p.ended:
	case <-timeout.C:
		t.Fatalf("childtest: %s did not end within %v", p.entry, Grace)
	}
	return p.err
}

// Kill sends SIGKILL and waits for the child's end. A child that has ended already is fine.
func (p *Process[F]) Kill(t testing.TB) {
	t.Helper()
	_ = p.cmd.Process.Kill() // an error: it has ended
	_ = p.Wait(t)            // how does not matter
}

// Stop sends SIGSTOP and returns when the child has stopped: from then on it does nothing.
func (p *Process[F]) Stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatalf("childtest: stop %s: %v", p.entry, err)
	}
	p.AwaitStopped(t)
}

// AwaitStopped returns when the child has stopped, by Stop or by itself. It fails the test if the child ends instead.
func (p *Process[F]) AwaitStopped(t testing.TB) {
	t.Helper()
	timeout := time.NewTimer(Grace)
	defer timeout.Stop()
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for !stopped(p.PID()) {
		select {
		case <-poll.C:
		case <-p.ended:
			t.Fatalf("childtest: %s ended instead of stopping: %v", p.entry, p.err)
		case <-timeout.C:
			t.Fatalf("childtest: %s did not stop within %v", p.entry, Grace)
		}
	}
}

// Continue sends SIGCONT.
func (p *Process[F]) Continue(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatalf("childtest: continue %s: %v", p.entry, err)
	}
}

func (p *Process[F]) cleanUp(t testing.TB) {
	t.Helper()
	p.Kill(t)
	said := p.Output()
	if strings.Contains(said, "WARNING: DATA RACE") {
		t.Errorf("childtest: %s: a data race", p.entry)
	}
	if t.Failed() && said != "" {
		t.Logf("childtest: %s (process %d) said:\n%s", p.entry, p.PID(), said)
	}
}
