// Command matrix runs the suites again in the environments that users have, and prints one line for each.
//
//	go run ./internal/matrix [NAME...]
//
// What an environment does not run is a closed list with reasons, checked here: each name on it must exist and pass in
// the usual environment, every other test must run and pass, and none may skip itself.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, names []string) error {
	known := map[string]bool{}
	for _, e := range environments {
		known[e.name] = true
	}
	for _, name := range names {
		if !known[name] {
			return fmt.Errorf("no environment is called %q", name)
		}
	}
	dir, err := os.MkdirTemp("", "pgonce-matrix-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // test binaries
	suites := suites{dir: dir, built: map[string]*suite{}}
	began, bad := time.Now(), 0
	for _, e := range environments {
		if len(names) > 0 && !slices.Contains(names, e.name) {
			continue
		}
		line, err := suites.run(ctx, e)
		_, _ = fmt.Fprintln(os.Stdout, line)
		for _, x := range e.notRun {
			_, _ = fmt.Fprintf(os.Stdout, "    not run: %s: %s\n", x.test, x.why)
		}
		if err != nil {
			bad++
			_, _ = fmt.Fprintf(os.Stdout, "    FAILED: %s\n", strings.ReplaceAll(err.Error(), "\n", "\n    "))
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d environments failed", bad)
	}
	_, _ = fmt.Fprintf(os.Stdout, "matrix: all passed in %.0f s\n", time.Since(began).Seconds())
	return nil
}
