package txn_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// txMethod is one method of pgx.Tx in a function's hands: during the function, and after it.
type txMethod struct {
	during, after func(ctx context.Context, t require.TestingT, tx pgx.Tx)
}

// txMethods has every method of pgx.Tx; TestTx_EveryMethod fails for one that a new pgx adds.
var txMethods = map[string]txMethod{
	"Begin": {
		during: savepoints,
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			inner, err := tx.Begin(ctx)
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			require.Nil(t, inner)
			err = pgx.BeginFunc(ctx, tx, func(pgx.Tx) error { panic("entered") })
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		},
	},
	"Commit": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.ErrorIs(t, tx.Commit(ctx), txn.ErrRunnerOwnsTransaction)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxClosed)
		},
	},
	"Rollback": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.ErrorIs(t, tx.Rollback(ctx), txn.ErrRunnerOwnsTransaction)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.ErrorIs(t, tx.Rollback(ctx), pgx.ErrTxClosed)
		},
	},
	"CopyFrom": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			n, err := tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"c1"}, {"c2"}}))
			require.NoError(t, err)
			require.EqualValues(t, 2, n)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"c3"}}))
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		},
	},
	"SendBatch": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			results := tx.SendBatch(ctx, twoStatements())
			_, err := results.Exec()
			require.NoError(t, err)
			var n int
			require.NoError(t, results.QueryRow().Scan(&n))
			require.Equal(t, 2, n)
			require.NoError(t, results.Close())
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			results := tx.SendBatch(ctx, twoStatements())
			_, err := results.Exec()
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			rows, err := results.Query()
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			requireClosed(t, rows)
			require.ErrorIs(t, results.QueryRow().Scan(new(int)), pgx.ErrTxClosed)
			require.ErrorIs(t, results.Close(), pgx.ErrTxClosed)
		},
	},
	"LargeObjects": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			objects := tx.LargeObjects()
			oid, err := objects.Create(ctx, 0)
			require.NoError(t, err)
			object, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
			require.NoError(t, err)
			_, err = object.Write([]byte("large"))
			require.NoError(t, err)
			_, err = object.Seek(0, io.SeekStart)
			require.NoError(t, err)
			content, err := io.ReadAll(object)
			require.NoError(t, err)
			require.Equal(t, "large", string(content))
			require.NoError(t, object.Close())
		},
		after: func(_ context.Context, t require.TestingT, tx pgx.Tx) {
			require.Panics(t, func() { tx.LargeObjects() })
		},
	},
	"Prepare": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			_, err := tx.Prepare(ctx, "one", `SELECT 1`)
			require.NoError(t, err)
			var n int
			require.NoError(t, tx.QueryRow(ctx, "one").Scan(&n))
			require.Equal(t, 1, n)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			_, err := tx.Prepare(ctx, "two", `SELECT 2`)
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		},
	},
	"Exec": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			tag, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ($1)`, "e")
			require.NoError(t, err)
			require.EqualValues(t, 1, tag.RowsAffected())
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ($1)`, "e")
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		},
	},
	"Query": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			rows, err := tx.Query(ctx, `SELECT generate_series(1, 3)`)
			require.NoError(t, err)
			all, err := pgx.CollectRows(rows, pgx.RowTo[int])
			require.NoError(t, err)
			require.Equal(t, []int{1, 2, 3}, all)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			rows, err := tx.Query(ctx, `SELECT 1`)
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			requireClosed(t, rows)
		},
	},
	"QueryRow": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			var n int
			require.NoError(t, tx.QueryRow(ctx, `SELECT $1::int`, 5).Scan(&n))
			require.Equal(t, 5, n)
		},
		after: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.ErrorIs(t, tx.QueryRow(ctx, `SELECT 1`).Scan(new(int)), pgx.ErrTxClosed)
		},
	},
	"Conn": {
		during: func(ctx context.Context, t require.TestingT, tx pgx.Tx) {
			require.NotNil(t, tx.Conn())
			require.NoError(t, tx.Conn().Ping(ctx))
		},
		after: func(_ context.Context, t require.TestingT, tx pgx.Tx) { require.Nil(t, tx.Conn()) },
	},
}

func twoStatements() *pgx.Batch {
	batch := &pgx.Batch{}
	batch.Queue(`INSERT INTO orders (key) VALUES ('b')`)
	batch.Queue(`SELECT 2`)
	return batch
}

// requireClosed requires of rows that came with an error what pgx does: checking that error may be left to the rows.
func requireClosed(t require.TestingT, rows pgx.Rows) {
	require.False(t, rows.Next())
	require.ErrorIs(t, rows.Err(), pgx.ErrTxClosed)
	require.ErrorIs(t, rows.Scan(), pgx.ErrTxClosed)
	_, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.NotPanics(t, func() {
		rows.Close()
		require.Zero(t, rows.CommandTag())
		require.Nil(t, rows.Conn())
		_, err := rows.Values()
		require.Error(t, err)
	})
}

// savepoints checks Begin: what is released stays, what is rolled back goes, at any depth.
func savepoints(ctx context.Context, t require.TestingT, tx pgx.Tx) {
	keys := func() (all []string) {
		rows, err := tx.Query(ctx, `SELECT key FROM things ORDER BY key`)
		require.NoError(t, err)
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	insert := func(tx pgx.Tx, key string) {
		_, err := tx.Exec(ctx, `INSERT INTO things VALUES ($1)`, key)
		require.NoError(t, err)
	}
	_, err := tx.Exec(ctx, `CREATE TEMP TABLE things (key text) ON COMMIT DROP`)
	require.NoError(t, err)
	outer, err := tx.Begin(ctx)
	require.NoError(t, err)
	insert(outer, "s1")
	inner, err := outer.Begin(ctx)
	require.NoError(t, err)
	insert(inner, "s2")
	require.NoError(t, inner.Rollback(ctx))
	require.ErrorIs(t, inner.Rollback(ctx), pgx.ErrTxClosed)
	require.ErrorIs(t, inner.Commit(ctx), pgx.ErrTxClosed)
	_, err = inner.Exec(ctx, `SELECT 1`)
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.NoError(t, outer.Commit(ctx))
	require.ErrorIs(t, outer.Rollback(ctx), pgx.ErrTxClosed, "as a deferred Rollback does")
	require.Equal(t, []string{"s1"}, keys())

	boom := errors.New("boom")
	require.ErrorIs(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		insert(tx, "s3")
		require.NoError(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			insert(tx, "s4")
			return nil
		}))
		return boom
	}), boom)
	require.Error(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT 1/0`)
		return err
	}))
	require.NoError(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		insert(tx, "s5")
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			insert(tx, "s6")
			return nil
		})
	}))
	require.Equal(t, []string{"s1", "s5", "s6"}, keys())

	// Two that were begun one after the other with one name would end the wrong one.
	first, err := tx.Begin(ctx)
	require.NoError(t, err)
	insert(first, "s7")
	second, err := tx.Begin(ctx)
	require.NoError(t, err)
	insert(second, "s8")
	require.NoError(t, first.Rollback(ctx))
	require.Equal(t, []string{"s1", "s5", "s6"}, keys())
}

func TestTx_EveryMethod(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	t.Cleanup(func() { s.requireIdle(t) })
	methods := reflect.TypeFor[pgx.Tx]()
	require.Len(t, txMethods, methods.NumMethod())
	for i := range methods.NumMethod() {
		name := methods.Method(i).Name
		method, known := txMethods[name]
		require.True(t, known, "pgx.Tx has a method %s: say what it does in a function, and after it", name)
		for _, end := range []error{nil, errors.New("rolled back")} {
			t.Run(fmt.Sprintf("%s/%v", name, end), func(t *testing.T) {
				t.Parallel()
				req := request(t, t.Name(), "body")
				var kept pgx.Tx
				var from, savepoint pgx.Tx
				_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
					kept = tx
					from, _ = txn.FromContext(ctx)
					method.during(ctx, t, tx)
					var err error
					if savepoint, err = tx.Begin(ctx); err != nil {
						return order{}, err
					}
					return order{}, end
				})
				require.ErrorIs(t, err, end)
				require.Same(t, kept, from, "the context carries the same transaction")
				method.after(t.Context(), t, kept)
				method.after(t.Context(), t, savepoint)
			})
		}
	}
	_, outside := txn.FromContext(t.Context())
	require.False(t, outside)
}

// A goroutine that outlives its function must not reach the next one's transaction on the same connection.
func TestTx_KeptTransactionCannotReachTheNext(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	var kept pgx.Tx
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k1", "body"), func(_ context.Context, tx pgx.Tx) (order, error) {
		kept = tx
		return order{}, nil
	})
	require.NoError(t, err)
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "k2", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		_, err := insertOrder(ctx, kept, "stray")
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		return insertOrder(ctx, tx, "k2")
	})
	require.NoError(t, err)
	require.Zero(t, s.orders(t, "stray"))
}

func TestTx_RunnerCalledFromInsideIsRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	res, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k1", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		for _, key := range []string{"k1", "k2"} {
			_, err := s.place(ctx, request(t, key, "body"))
			require.ErrorIs(t, err, idempotency.ErrNested)
		}
		return insertOrder(ctx, tx, "k1")
	})
	require.NoError(t, err)
	require.False(t, res.Replayed)
}

func TestTx_UsedSaysWhetherTheFunctionAskedAnything(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, use := range map[string]func(context.Context, pgx.Tx){
		"Nothing":   nil,
		"Statement": func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "SELECT 1") },
		"Savepoint": func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Begin(ctx) },
		"Conn":      func(_ context.Context, tx pgx.Tx) { tx.Conn() },
	} {
		used, err := txn.WithIdempotency(t.Context(), s.runner, request(t, name, "body"), func(ctx context.Context, tx pgx.Tx) (bool, error) {
			require.False(t, txn.Used(tx))
			if use != nil {
				use(ctx, tx)
			}
			return txn.Used(tx), nil
		})
		require.NoError(t, err)
		require.Equal(t, use != nil, used.Value, name)
	}
	tx, err := s.direct.Begin(t.Context())
	require.NoError(t, err)
	require.True(t, txn.Used(tx), "of nobody else's is anything known")
	require.NoError(t, tx.Rollback(t.Context()))
}
