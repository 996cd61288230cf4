//go:build pooler

package db_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// The real one, in transaction mode. Its clients share sessions, so that named statements of pgx's default mode collide.
func TestCase_D03_ThroughPgBouncerEveryMigratorIsRefusedAndTheScriptWorks(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	pooled := pgtest.ThroughPooler(t, url)
	observer := connect(t, url)

	refusals := make(chan error, 20)
	for range cap(refusals) {
		pool := newPool(t, pooled)
		go func() { refusals <- db.Migrate(t.Context(), pool) }()
	}
	for range cap(refusals) {
		require.ErrorContains(t, <-refusals, "a pooler stands between")
	}
	require.Equal(t, []bool{true}, column[bool](t, observer,
		`SELECT to_regnamespace('idempotency') IS NULL AND to_regclass('public.pgonce_goose_version') IS NULL`))

	installed := make(chan error, 5)
	for range cap(installed) {
		pool := newPool(t, pooled)
		go func() {
			_, err := pool.Exec(t.Context(), db.InstallSQL())
			installed <- err
		}()
	}
	for range cap(installed) {
		require.NoError(t, <-installed)
	}
	requireMigratedOnce(t, observer)
	require.NoError(t, db.Migrate(t.Context(), newPool(t, pooled)), "nothing to do: the pooler is no obstacle")
}

// A direct connection for Migrate while the application is on the pooler: how it is meant to be.
func TestCase_D03_MigrateDirectlyWhileTheApplicationIsOnThePooler(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	app := newPool(t, pgtest.ThroughPooler(t, url), func(c *pgxpool.Config) { c.MaxConns = 4 })
	tx, err := app.Begin(t.Context()) // open, with a snapshot, all the time
	require.NoError(t, err)
	column[int32](t, tx, `SELECT 1`)
	require.NoError(t, db.Migrate(t.Context(), newPool(t, url)))
	require.NoError(t, tx.Commit(t.Context()))
	requireMigratedOnce(t, connect(t, url))
}
