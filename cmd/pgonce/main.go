// Command pgonce is the operator's: it looks into idempotency records, changes them by hand with a trace of who and why,
// migrates the schema, and examines PostgreSQL and Redis. See docs/operator.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

// Exit statuses.
const (
	exitOK      = 0
	exitRefused = 1 // a finding, a refusal, or something that could not be asked
	exitUsage   = 2 // the command line is wrong: nothing was asked
)

// usageError is a wrong command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }

func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// errSaid ends a command with status 1 whose output has said why.
var errSaid = errors.New("said")

func main() {
	redis.SetLogger(silent{}) // what it says there, the command says once
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], &world{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv})
	stop()
	os.Exit(code)
}

// silent is go-redis' logger.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// world is what surrounds the program.
type world struct {
	in       io.Reader
	out, err io.Writer
	getenv   func(string) string
}

func run(ctx context.Context, args []string, w *world) int {
	root := newRoot(w) //nolint:contextcheck // a command has its context when it runs
	root.SetArgs(args)
	root.SetIn(w.in)
	root.SetOut(w.out)
	root.SetErr(w.err)
	err := root.ExecuteContext(ctx)
	var usage *usageError
	var invalid *idempotency.InvalidError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errSaid):
		return exitRefused
	case errors.As(err, &usage), errors.As(err, &invalid), isCobraUsage(err):
		_, _ = fmt.Fprintf(w.err, "pgonce: %s\n", printable(err.Error()))
		return exitUsage
	}
	_, _ = fmt.Fprintf(w.err, "pgonce: %s\n", printable(err.Error()))
	return exitRefused
}

// isCobraUsage recognises what cobra says before a command runs: it has no types for most of these.
func isCobraUsage(err error) bool {
	for _, begin := range []string{"unknown command", "required flag", "if any flags in the group", "at least one of the flags"} {
		if strings.HasPrefix(err.Error(), begin) {
			return true
		}
	}
	return false
}
