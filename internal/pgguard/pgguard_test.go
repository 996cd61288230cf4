package pgguard_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgguard"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// newPool is a pool of one connection behind a proxy that sees what it dials.
func newPool(t *testing.T) (*pgxpool.Pool, *pgproxy.Proxy) {
	t.Helper()
	url := pgtest.URL(t)
	proxy, err := pgproxy.Start(t.Context(), url, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, proxy.Close()) })
	cfg, err := pgxpool.ParseConfig(proxy.URL(url))
	require.NoError(t, err)
	cfg.MaxConns = 1
	pgguard.Configure(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool, proxy
}

func TestGuard_CommitIsNotCancelled(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]func(context.Context, *pgxpool.Pool) error{
		"Tx": func(ctx context.Context, pool *pgxpool.Pool) error {
			return pgx.BeginFunc(ctx, pool, func(pgx.Tx) error { return nil })
		},
		"by hand": func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, "COMMIT")
			return err
		},
		"by its other name": func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, "END")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, proxy := newPool(t)
			require.NoError(t, pool.Ping(t.Context()))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			proxy.Decide(func(pgproxy.Commit) pgproxy.Rule { // so it was sent
				cancel()
				return pgproxy.Rule{Do: pgproxy.DelayReply, Delay: 5 * time.Second}
			})
			require.ErrorIs(t, commit(ctx, pool), context.Canceled)
			require.EqualValues(t, 1, proxy.Stats().Commits)
			pool.Close() // waits until the connection has done all it does
			require.Zero(t, proxy.Stats().Cancels)
		})
	}
}

// Once COMMIT has answered, the connection is like any other.
func TestGuard_WhatFollowsACommitIsCancelled(t *testing.T) {
	t.Parallel()
	pool, proxy := newPool(t)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(pgx.Tx) error { return nil }))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := pool.Exec(ctx, "SELECT pg_sleep(60)")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	pool.Close()
	require.EqualValues(t, 1, proxy.Stats().Cancels)
	require.EqualValues(t, 1, proxy.Stats().Connections)
}
