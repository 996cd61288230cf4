package txnsql_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// overSQL is a sql.Tx in the words of the suite's functions.
type overSQL struct {
	pgx.Tx
	tx *sql.Tx
}

func (o overSQL) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	_, err := o.tx.ExecContext(ctx, query, args...)
	return pgconn.CommandTag{}, err
}

func service(runner *txnsql.Runner, querier idempotency.Querier) *idempotencytest.Service {
	return &idempotencytest.Service{
		Final: txn.Final, Querier: querier,
		Call: func(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (idempotencytest.Answer, error) {
			res, err := txnsql.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
				return fn(ctx, overSQL{tx: tx})
			})
			return idempotencytest.Answer{Result: res.Value, Replayed: res.Replayed, Record: res.Record}, err
		},
	}
}

// The library's suite over sql.DBs: none of its examinations is left out.
func TestConformance_SameAnswersThroughDatabaseSQL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		conns int
		mode  pgx.QueryExecMode
		pool  bool // of a pgxpool.Pool
		front bool
	}{
		{name: "8 connections", conns: 8},
		{name: "1 connection", conns: 1},
		{name: "2 connections of a pool", conns: 2, pool: true},
		{name: "query mode exec", conns: 4, mode: pgx.QueryExecModeExec},
		{name: "local front", conns: 4, front: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			direct := pgtest.Pool(t)
			_, err := direct.Exec(t.Context(), idempotencytest.Table)
			require.NoError(t, err)
			var db *sql.DB
			if c.pool {
				config, err := pgxpool.ParseConfig(direct.Config().ConnString())
				require.NoError(t, err)
				config.MaxConns = int32(c.conns) //nolint:gosec // few
				txn.ConfigurePool(config)
				pool, err := pgxpool.NewWithConfig(t.Context(), config)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				db = txnsql.OpenDBFromPool(pool)
			} else {
				config, err := pgx.ParseConfig(direct.Config().ConnString())
				require.NoError(t, err)
				if c.mode != 0 {
					config.DefaultQueryExecMode = c.mode
				}
				db = txnsql.OpenDB(config)
				db.SetMaxOpenConns(c.conns)
			}
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			config := &txn.Config{Operations: idempotencytest.Operations()}
			if c.front {
				front, err := localfront.New(nil)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, front.Close()) })
				config.Fronts = []idempotency.Front{front}
			}
			runner, err := txnsql.New(db, config)
			require.NoError(t, err)
			t.Cleanup(runner.Close)
			idempotencytest.Run(t, service(runner, direct))
			require.Eventually(t, func() bool { return db.Stats().InUse == 0 }, 30*time.Second, time.Millisecond)
		})
	}
}

// D1: whoever comes, however often, every key has one order and one answer.
func TestCase_D01_ManyGoroutinesManyKeys(t *testing.T) {
	t.Parallel()
	const goroutines, keys, tries = 16, 400, 8
	s := newShop(t)
	var next atomic.Int64
	ids := make([]sync.Map, keys)
	var group sync.WaitGroup
	errs := make([]error, goroutines)
	for g := range goroutines {
		group.Go(func() {
			for {
				n := int(next.Add(1)) - 1
				if n >= keys*tries || errs[g] != nil {
					return
				}
				// Tries of a key lie 16 apart, so that they meet.
				k := n/(16*tries)*16 + n%16
				req := request(t, create, fmt.Sprintf("k%d", k), "body")
				res, err := s.place(t.Context(), req)
				if err != nil {
					errs[g] = err
					return
				}
				ids[k].Store(res.Value, true)
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	var orders, distinct, records int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT key), (SELECT count(*) FROM idempotency.records WHERE state = 'SUCCESS') FROM orders`).
		Scan(&orders, &distinct, &records))
	require.Equal(t, []int{keys, keys, keys}, []int{orders, distinct, records})
	for k := range ids {
		answers := 0
		ids[k].Range(func(any, any) bool { answers++; return true })
		require.Equal(t, 1, answers, "all callers of one key got one answer")
	}
}
