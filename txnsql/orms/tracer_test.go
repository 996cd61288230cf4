package orms

import (
	"bytes"
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// Whoever is between a statement and its connection, a report names the place in the program.
func TestTracer_NamesThePlaceInTheProgram(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer // one goroutine
	s := newShop(t, txn.NewTracer(&txn.TracerConfig{Log: slog.New(slog.NewTextHandler(&log, nil))}).AddTo)
	gdb, err := openGORM(s.db)
	require.NoError(t, err)
	log.Reset()
	_, err = txnsql.WithIdempotency(t.Context(), s.runner, request(t, "k"), func(ctx context.Context, _ *sql.Tx) (n int, err error) {
		for _, past := range []func() error{
			func() error { _, err := s.db.ExecContext(ctx, `SELECT 1`); return err },
			func() error { return gdb.WithContext(ctx).Create(&Order{Key: "k", SKU: "tea"}).Error },
			func() error { return sqlx.NewDb(s.db, "pgx").GetContext(ctx, &n, `SELECT 1`) },
			func() error {
				_, err := createOrder(ctx, entsql.OpenDB(dialect.Postgres, s.db), "k", "tea")
				return err
			},
		} {
			require.NoError(t, past())
		}
		return n, nil
	})
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.GreaterOrEqual(t, len(lines), 4)
	for _, line := range lines {
		require.Regexp(t, `caller=\S*/orms/[a-z]+_test\.go:\d+`, line)
	}
}
