// Command dockerstack runs a PostgreSQL or Redis in a container for internal/devstack, which starts it as a child.
//
// It reads one line of JSON, the request, from standard input, and writes one, the server's URL, to standard output. It
// removes the container and ends when its input ends, and that is when its parent closes it or dies. It is a module of
// its own so that testcontainers is nobody's requirement but its own.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// request and answer have their twins in internal/devstack/docker.go.
type request struct {
	Server   string            `json:"server"` // postgres or redis
	Image    string            `json:"image"`
	Password string            `json:"password"`
	Settings map[string]string `json:"settings"`
}

type answer struct {
	URL string `json:"url"`
}

// server is a running container.
type server struct {
	url    string
	remove func() error
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdin, os.Stdout, start)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "dockerstack:", err)
		os.Exit(1)
	}
}

// run serves one request until its input ends or ctx does.
func run(
	ctx context.Context, in io.Reader, out io.Writer, start func(context.Context, request) (server, error),
) error {
	lines := bufio.NewReader(in)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	var r request
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields() // a setting that is not understood would be silently missing
	if err := decoder.Decode(&r); err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // it may end while the container starts, which an image to pull makes long
		_, _ = io.Copy(io.Discard, lines) // an error ends the input too
		cancel()
	}()

	s, err := start(ctx, r)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(answer{URL: s.url}); err != nil {
		return errors.Join(fmt.Errorf("write answer: %w", err), s.remove())
	}
	<-ctx.Done()
	return s.remove()
}
