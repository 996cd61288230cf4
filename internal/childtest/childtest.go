// Package childtest runs a part of a test in a child process, which can be killed or stopped at any moment.
//
// The child is the test binary itself. An entry is a function with a name, registered in a package variable, so that both
// processes know it; TestMain calls Main first. What the child tells, line by line through a pipe, the parent keeps even
// if the child is killed right after: a fact whose tell has returned is known to the parent, always.
//
//	var place = childtest.Register("place", func(ctx context.Context, args Args, tell func(Fact)) error { ... })
//
//	func TestMain(m *testing.M) { childtest.Main(); pgtest.Main(m) }
//
//	child := place.Start(t, Args{URL: url})
//	child.Await(t, func(f Fact) bool { return f.Key == "k" })
//	child.Kill(t)
//	facts := child.Facts()
package childtest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
)

const (
	// variable names the entry that a process is a child for.
	variable = "PGONCE_CHILD"
	// factsFD is the pipe's end in the child: the first of exec.Cmd.ExtraFiles.
	factsFD = 3
	// failedCode is the exit code of a child whose entry returned an error.
	failedCode = 10
)

// Entry is a function that runs in children. A is its argument and F what it tells; both travel as JSON.
type Entry[A, F any] struct{ name string }

// entries are the registered ones. They are written before main and read after.
var entries = map[string]func() error{}

// Register makes an entry. Call it to initialise a package variable; a name that is taken panics.
//
// run gets the arguments given to Start. tell acknowledges a fact to the parent and returns when the parent will know it,
// whatever happens then; it may be called concurrently. The error that run returns is what Wait returns.
func Register[A, F any](name string, run func(ctx context.Context, args A, tell func(F)) error) Entry[A, F] {
	if name == "" || entries[name] != nil {
		panic(fmt.Sprintf("childtest: an entry needs a name of its own, not %q", name))
	}
	entries[name] = func() error {
		var args A
		if err := json.NewDecoder(os.Stdin).Decode(&args); err != nil {
			return fmt.Errorf("childtest: read arguments of %s: %w", name, err)
		}
		told := &teller{pipe: os.NewFile(factsFD, "facts")}
		return run(context.Background(), args, func(fact F) { told.tell(fact) })
	}
	return Entry[A, F]{name: name}
}

// Main returns at once in the test binary itself. In a child it runs the entry and ends the process. Call it first in
// TestMain.
func Main() {
	name, isChild := os.LookupEnv(variable)
	if !isChild {
		return
	}
	closeOnExec(factsFD)
	run := entries[name]
	if run == nil {
		_, _ = fmt.Fprintf(os.Stderr, "childtest: no entry is called %q: is it registered in a package variable?\n", name)
		os.Exit(failedCode)
	}
	if err := run(); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		os.Exit(failedCode)
	}
	os.Exit(0)
}

// teller writes facts. A pipe's content outlives its writer.
type teller struct {
	mu   sync.Mutex // a line longer than the pipe's atomic write must not be mixed with another
	pipe *os.File
}

func (t *teller) tell(fact any) {
	if err := t.write(fact); err != nil {
		// Whatever is not acknowledged must not go on as if it were.
		_, _ = fmt.Fprintln(os.Stderr, "childtest: tell:", err)
		os.Exit(failedCode)
	}
}

func (t *teller) write(fact any) error {
	line, err := json.Marshal(fact)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err = t.pipe.Write(append(line, '\n'))
	return err
}
