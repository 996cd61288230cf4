package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// line is what internal/devstack sends.
const line = `{"server":"postgres","image":"postgres:18","password":"p","settings":{"fsync":"off"}}` + "\n"

func TestRun_ServesUntilItsInputEnds(t *testing.T) {
	t.Parallel()
	in, parent := io.Pipe()
	child, out := io.Pipe()
	var got request
	removed, ended := false, make(chan error, 1)
	go func() {
		ended <- run(t.Context(), in, out, func(_ context.Context, r request) (server, error) {
			got = r
			return server{url: "postgres://x", remove: func() error { removed = true; return nil }}, nil
		})
	}()
	_, err := parent.Write([]byte(line))
	require.NoError(t, err)
	answer := make([]byte, 100)
	n, err := child.Read(answer)
	require.NoError(t, err)
	require.Equal(t, `{"url":"postgres://x"}`+"\n", string(answer[:n]))
	require.Equal(t, request{
		Server: "postgres", Image: "postgres:18", Password: "p", Settings: map[string]string{"fsync": "off"},
	}, got)
	require.Empty(t, ended, "the parent lives")

	require.NoError(t, parent.Close())
	require.NoError(t, <-ended)
	require.True(t, removed)
}

func TestRun_InputThatEndsWhileItStartsEndsTheStart(t *testing.T) {
	t.Parallel()
	err := run(t.Context(), bytes.NewBufferString(line), io.Discard, func(ctx context.Context, _ request) (server, error) {
		<-ctx.Done()
		return server{}, ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
}

func TestRun_SignalEndsIt(t *testing.T) {
	t.Parallel()
	ctx, signal := context.WithCancel(t.Context())
	in, parent := io.Pipe()
	t.Cleanup(func() { _ = parent.Close() })
	go func() { _, _ = parent.Write([]byte(line)) }()
	removed := false
	require.NoError(t, run(ctx, in, io.Discard, func(context.Context, request) (server, error) {
		signal()
		return server{remove: func() error { removed = true; return nil }}, nil
	}))
	require.True(t, removed)
}

func TestRun_AnswerNobodyReadsRemovesTheContainer(t *testing.T) {
	t.Parallel()
	child, out := io.Pipe()
	require.NoError(t, child.Close())
	removed := false
	err := run(t.Context(), bytes.NewBufferString(line), out, func(context.Context, request) (server, error) {
		return server{remove: func() error { removed = true; return errors.New("and that fails too") }}, nil
	})
	require.ErrorIs(t, err, io.ErrClosedPipe)
	require.ErrorContains(t, err, "and that fails too")
	require.True(t, removed)
}

func TestRun_RefusesWhatItDoesNotUnderstand(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", line[:20], "nonsense\n", `{"server":"redis","colour":"red"}` + "\n"} {
		err := run(t.Context(), bytes.NewBufferString(text), io.Discard, func(context.Context, request) (server, error) {
			panic("not to be started")
		})
		require.ErrorContains(t, err, "read request", text)
	}
	_, err := start(t.Context(), request{Server: "mysql"})
	require.ErrorContains(t, err, `"mysql"`)
}

func TestPostgresCommand(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"postgres", "-c", "fsync=off", "-c", "timezone=UTC"},
		postgresCommand(map[string]string{"timezone": "UTC", "fsync": "off"}))
}

func TestRedisURL(t *testing.T) {
	t.Parallel()
	got, err := redisURL("redis://localhost:32768", "p")
	require.NoError(t, err)
	require.Equal(t, "redis://:p@localhost:32768/0", got)
}
