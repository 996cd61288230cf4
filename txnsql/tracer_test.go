package txnsql_test

import (
	"context"
	"database/sql"
	"log/slog"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// reports are what a tracer has found.
type reports struct {
	mu   sync.Mutex
	seen []idempotency.OutsideTransaction
}

func (r *reports) onEvent(_ context.Context, e idempotency.Event) {
	if out, is := e.(idempotency.OutsideTransaction); is {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.seen = append(r.seen, out)
	}
}

func (r *reports) take() []idempotency.OutsideTransaction {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = nil
	return seen
}

// traced is a shop whose sql.DB has a tracer, opened in both ways.
func traced(t *testing.T, fromPool, refuse bool) (*shop, *reports) {
	t.Helper()
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`)
	require.NoError(t, err)
	tracer, found := txn.NewTracer(&txn.TracerConfig{Refuse: refuse, Log: slog.New(slog.DiscardHandler)}), &reports{}
	s := &shop{direct: direct}
	if fromPool {
		config, err := pgxpool.ParseConfig(direct.Config().ConnString())
		require.NoError(t, err)
		config.MaxConns = 8
		tracer.AddTo(config.ConnConfig)
		txn.ConfigurePool(config)
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		s.db = txnsql.OpenDBFromPool(pool)
	} else {
		config, err := pgx.ParseConfig(direct.Config().ConnString())
		require.NoError(t, err)
		tracer.AddTo(config)
		s.db = txnsql.OpenDB(config)
		s.db.SetMaxOpenConns(8)
	}
	t.Cleanup(func() { require.NoError(t, s.db.Close()) })
	s.runner = newRunner(t, s.db, func(c *txn.Config) { c.OnEvent = found.onEvent })
	return s, found
}

// opened is how a sql.DB may be: by OpenDBFromPool, or not.
var opened = map[string]bool{"OpenDB": false, "OpenDBFromPool": true}

func TestTracer_SQLNoFalseReports(t *testing.T) {
	t.Parallel()
	for name, fromPool := range opened {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, found := traced(t, fromPool, true)
			inner := newRunner(t, s.db, func(c *txn.Config) { c.OnEvent = found.onEvent })
			outside, err := s.db.PrepareContext(t.Context(), `INSERT INTO orders (key) VALUES ($1)`)
			require.NoError(t, err)
			defer func() { require.NoError(t, outside.Close()) }()
			own := func(ctx context.Context, tx *sql.Tx) (int64, error) {
				mine, is := txnsql.FromContext(ctx)
				require.True(t, is)
				require.Same(t, tx, mine)
				native, is := txn.FromContext(ctx)
				require.True(t, is)
				_, err := native.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"own"}}))
				require.NoError(t, err)
				_, err = tx.StmtContext(ctx, outside).ExecContext(ctx, "own") //nolint:sqlclosecheck // the transaction closes it
				require.NoError(t, err)
				prepared, err := tx.PrepareContext(ctx, `INSERT INTO orders (key) VALUES ($1)`) //nolint:sqlclosecheck // so too
				require.NoError(t, err)
				_, err = prepared.ExecContext(ctx, "own")
				require.NoError(t, err)
				return insertOrder(ctx, tx, "own")
			}
			nested := func(ctx context.Context, tx *sql.Tx) (int64, error) {
				id, err := own(ctx, tx)
				require.NoError(t, err)
				_, err = txnsql.WithIdempotencyTx(ctx, inner, tx, request(t, invoice, "joined inside", "body"), own)
				require.NoError(t, err)
				for range 2 {
					_, err = txnsql.WithIdempotency(ctx, inner, request(t, invoice, "alone inside", "body"), own)
					require.NoError(t, err)
				}
				return id, nil
			}
			_, err = txnsql.WithIdempotency(t.Context(), s.runner, request(t, create, "k", "body"), nested)
			require.NoError(t, err)
			_, err = txnsql.WithIdempotencyMany(t.Context(), s.runner, []idempotency.Request{request(t, create, "1", "body"), request(t, create, "2", "body")},
				func(ctx context.Context, tx *sql.Tx, _ int) (int64, error) { return own(ctx, tx) })
			require.NoError(t, err)
			_, err = txnsql.WithLease(t.Context(), s.runner, request(t, pay, "leased", "body"), func(ctx context.Context, _ *txn.Lease) (int, error) {
				_, err := s.db.ExecContext(ctx, `INSERT INTO orders (key) VALUES ('foreign')`)
				return 1, err
			}, func(ctx context.Context, tx *sql.Tx, _ int) (int64, error) { return own(ctx, tx) })
			require.NoError(t, err)
			outer, err := s.db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			joined, err := txnsql.WithIdempotencyTx(t.Context(), s.runner, outer, request(t, create, "joined", "body"), own)
			require.NoError(t, err)
			require.NoError(t, outer.Commit())
			require.NoError(t, joined.AfterCommit(t.Context()))
			require.Empty(t, found.take())
		})
	}
}

func TestTracer_SQLReportsWhatGoesPast(t *testing.T) {
	t.Parallel()
	for name, fromPool := range opened {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, found := traced(t, fromPool, false)
			past := func(ctx context.Context, tx *sql.Tx) (int64, error) {
				_, err := s.db.ExecContext(ctx, `INSERT INTO orders (key) VALUES ('outside')`)
				require.NoError(t, err)
				return insertOrder(ctx, tx, "own")
			}
			for _, key := range []string{"k", "k2"} {
				_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, create, key, "body"), past)
				require.NoError(t, err)
				texts := 0
				for _, e := range found.take() {
					require.Equal(t, key, e.Key.Value())
					require.Regexp(t, `tracer_test\.go:\d+$`, e.Caller)
					if e.Call == "query" {
						texts++
						require.Equal(t, `INSERT INTO orders (key) VALUES ('outside')`, e.SQL)
					}
				}
				require.Equal(t, 1, texts)
			}
			require.Equal(t, 2, s.orders(t, "outside"))
		})
	}
}

func TestTracer_SQLRefuses(t *testing.T) {
	t.Parallel()
	for name, fromPool := range opened {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, found := traced(t, fromPool, true)
			_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, create, "k", "body"), func(ctx context.Context, tx *sql.Tx) (int64, error) {
				_, err := s.db.ExecContext(ctx, `INSERT INTO orders (key) VALUES ('outside')`)
				require.Error(t, err)
				return insertOrder(ctx, tx, "own")
			})
			require.NoError(t, err)
			require.NotEmpty(t, found.take())
			require.Zero(t, s.orders(t, "outside"))
			require.Equal(t, 1, s.orders(t, "own"))
		})
	}
}
