//go:build pooler

package txnsql_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// The library's suite through PgBouncer in transaction mode.
func TestConformance_BehindAPooler(t *testing.T) {
	t.Parallel()
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), idempotencytest.Table)
	require.NoError(t, err)
	config, err := pgx.ParseConfig(pgtest.ThroughPooler(t, direct.Config().ConnString()))
	require.NoError(t, err)
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	db := txnsql.OpenDB(config)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	db.SetMaxOpenConns(8)
	runner, err := txnsql.New(db, &txn.Config{Operations: idempotencytest.Operations()})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	idempotencytest.Run(t, service(runner, direct))
	require.Eventually(t, func() bool { return db.Stats().InUse == 0 }, 30*time.Second, time.Millisecond)
}
