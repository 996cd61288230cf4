package txn_test

import (
	"bytes"
	"context"
	"database/sql/driver"
	"errors"
	"log/slog"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// sightings are what a tracer has reported.
type sightings struct {
	mu   sync.Mutex
	seen []idempotency.OutsideTransaction
	log  bytes.Buffer // of the tracer
	told chan struct{}
}

func (s *sightings) onEvent(_ context.Context, e idempotency.Event) {
	if out, is := e.(idempotency.OutsideTransaction); is {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.seen = append(s.seen, out)
		select {
		case s.told <- struct{}{}:
		default:
		}
	}
}

// config tells the sightings. A call inside a function has a transaction of its own, and must not be in conflict with that around
// it: the isolation level is the tests' choice.
func (s *sightings) config(c *txn.Config) { c.OnEvent, c.Isolation = s.onEvent, pgx.ReadCommitted }

func (s *sightings) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(p)
}

// take returns what was reported since the last time.
func (s *sightings) take() []idempotency.OutsideTransaction {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen
	s.seen = nil
	return seen
}

// newTracedShop is a shop whose pools have a tracer; another is a second pool on its database.
func newTracedShop(t testing.TB, refuse bool, conns int32) (s *shop, another *pgxpool.Pool, seen *sightings) {
	t.Helper()
	seen = &sightings{told: make(chan struct{}, 1)}
	tracer := txn.NewTracer(&txn.TracerConfig{Refuse: refuse, Log: slog.New(slog.NewTextHandler(seen, nil))})
	s = newShopWith(t, func(c *pgxpool.Config) {
		c.MaxConns = conns
		tracer.AddTo(c.ConnConfig)
	}, seen.config)
	config := s.pool.Config().Copy()
	config.MaxConns, config.BeforeConnect, config.ConnConfig.Tracer = 4, nil, nil
	tracer.AddTo(config.ConnConfig)
	another, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(another.Close)
	return s, another, seen
}

const outsideInsert = `INSERT INTO orders (key) VALUES ($1)`

// wayOut is one way past the transaction, and what is reported of it: the calls, and the text of one of them.
type wayOut struct {
	calls []string
	sql   string
	do    func(ctx context.Context, pool *pgxpool.Pool) error
}

var waysOut = map[string]wayOut{
	"Exec": {[]string{"acquire", "query"}, outsideInsert, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := pool.Exec(ctx, outsideInsert, "outside")
		return err
	}},
	"Query": {[]string{"acquire", "query"}, outsideInsert, func(ctx context.Context, pool *pgxpool.Pool) error {
		rows, err := pool.Query(ctx, outsideInsert, "outside")
		rows.Close()
		return errors.Join(err, rows.Err())
	}},
	"QueryRow": {[]string{"acquire", "query"}, outsideInsert + " RETURNING id", func(ctx context.Context, pool *pgxpool.Pool) error {
		var id int64
		return pool.QueryRow(ctx, outsideInsert+" RETURNING id", "outside").Scan(&id)
	}},
	"SendBatch": {[]string{"acquire", "batch"}, outsideInsert + ";\nSELECT 1", func(ctx context.Context, pool *pgxpool.Pool) error {
		b := &pgx.Batch{}
		b.Queue(outsideInsert, "outside")
		b.Queue("SELECT 1")
		return pool.SendBatch(ctx, b).Close()
	}},
	"CopyFrom": {[]string{"acquire", "copy"}, `COPY "orders" ("key") FROM STDIN`, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"outside"}}))
		return err
	}},
	"Begin": {[]string{"acquire", "query", "query", "query"}, "begin", func(ctx context.Context, pool *pgxpool.Pool) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, outsideInsert, "outside")
			return err
		})
	}},
	"Acquire": {[]string{"acquire"}, "", func(ctx context.Context, pool *pgxpool.Pool) error {
		conn, err := pool.Acquire(ctx)
		if err == nil {
			conn.Release()
		}
		return err
	}},
	"Prepare": {[]string{"acquire", "prepare"}, outsideInsert, func(ctx context.Context, pool *pgxpool.Pool) error {
		return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			_, err := conn.Conn().Prepare(ctx, "", outsideInsert)
			return err
		})
	}},
	"a connection of its own": {[]string{"query"}, outsideInsert, func(ctx context.Context, pool *pgxpool.Pool) error {
		conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, outsideInsert, "outside")
		return errors.Join(err, conn.Close(ctx))
	}},
	"database/sql": {[]string{"query"}, outsideInsert, func(ctx context.Context, pool *pgxpool.Pool) error {
		db := stdlib.OpenDB(*pool.Config().ConnConfig)
		_, err := db.ExecContext(ctx, outsideInsert, "outside")
		return errors.Join(err, db.Close())
	}},
}

func TestTracer_ReportsEveryWayOut(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		for name, out := range waysOut {
			t.Run(way+"/"+name, func(t *testing.T) {
				t.Parallel()
				s, another, seen := newTracedShop(t, false, 4)
				places := map[string]bool{}
				for key, pool := range map[string]*pgxpool.Pool{"k": s.pool, "k2": another} {
					_, err := call(t.Context(), s, request(t, key, "body"), doing(key, func(ctx context.Context, _ pgx.Tx) error {
						return out.do(context.WithoutCancel(ctx), pool)
					}))
					require.NoError(t, err)
					var calls, texts []string
					for _, e := range seen.take() {
						require.Equal(t, request(t, key, "body").Key, e.Key)
						require.False(t, e.Refused)
						require.Regexp(t, regexp.MustCompile(`tracer_test\.go:\d+$`), filepath.ToSlash(e.Caller))
						places[e.Call+e.Caller] = true
						calls, texts = append(calls, e.Call), append(texts, e.SQL)
					}
					require.Equal(t, out.calls, calls)
					require.Contains(t, texts, out.sql)
				}
				log := seen.log.String()
				require.NotEmpty(t, log)
				require.NotContains(t, log, "outside\"", "no argument")
				require.Contains(t, log, "order.create#")
				require.Equal(t, len(places), strings.Count(log, "level=WARN"), "a place is told once: %s", log)
			})
		}
	}
}

// A pool of one would wait for ever: the report comes before.
func TestTracer_ReportsBeforeAPoolOfOneWaits(t *testing.T) {
	t.Parallel()
	s, _, seen := newTracedShop(t, false, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := txn.WithIdempotency(ctx, s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
		waiting := make(chan error, 1)
		go func() {
			_, err := s.pool.Exec(ctx, outsideInsert, "outside")
			waiting <- err
		}()
		<-seen.told
		cancel()
		return <-waiting
	}))
	require.ErrorIs(t, err, context.Canceled)
	require.Len(t, seen.take(), 1)

	refusing, _, _ := newTracedShop(t, true, 1)
	_, err = refusing.place(t.Context(), request(t, "warm", "body"))
	require.NoError(t, err)
	_, err = txn.WithIdempotency(t.Context(), refusing.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
		_, err := refusing.pool.Exec(ctx, outsideInsert, "outside")
		return err
	}))
	require.ErrorIs(t, err, txn.ErrOutsideTransaction, "at once")
}

// What is refused is not sent, says what to do, and harms neither the transaction nor the connection it was refused on.
func TestTracer_Refuses(t *testing.T) {
	t.Parallel()
	for name, out := range waysOut {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, another, seen := newTracedShop(t, true, 4)
			for _, pool := range []*pgxpool.Pool{s.pool, another} {
				_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
					return out.do(ctx, pool)
				}))
				if name == "database/sql" { // pgx's driver hides every error of a statement that was not sent, and tries three times
					require.ErrorIs(t, err, driver.ErrBadConn)
					require.Len(t, seen.take(), 3)
					require.Contains(t, seen.log.String(), "refused=true")
					continue
				}
				require.ErrorIs(t, err, txn.ErrOutsideTransaction)
				require.ErrorContains(t, err, "use the transaction that it was given")
				require.ErrorContains(t, err, "tracer_test.go:")
				var typed *txn.OutsideTransactionError
				require.ErrorAs(t, err, &typed)
				require.True(t, typed.Refused)
				require.Len(t, seen.take(), 1)
			}
			require.Zero(t, s.orders(t, "outside"))
			require.Zero(t, s.orders(t, "k"))
			_, err := s.place(t.Context(), request(t, "k", "body"))
			require.NoError(t, err, "the key is free")
		})
	}
}

// On a connection that was there before, with a transaction of the caller open on it: only the statement fails.
func TestTracer_RefusedStatementLeavesItsConnectionUsable(t *testing.T) {
	t.Parallel()
	s, another, seen := newTracedShop(t, true, 4)
	conn, err := another.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	earlier, err := conn.Begin(t.Context())
	require.NoError(t, err)
	statements := map[string]func(context.Context) error{
		"exec": func(ctx context.Context) error {
			_, err := earlier.Exec(ctx, outsideInsert, "outside")
			return err
		},
		"query": func(ctx context.Context) error {
			rows, err := earlier.Query(ctx, outsideInsert, "outside")
			rows.Close()
			return errors.Join(err, rows.Err())
		},
		"batch": func(ctx context.Context) error {
			b := &pgx.Batch{}
			b.Queue(outsideInsert, "outside")
			return earlier.SendBatch(ctx, b).Close()
		},
		"copy": func(ctx context.Context) error {
			_, err := earlier.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"outside"}}))
			return err
		},
		"prepare": func(ctx context.Context) error {
			_, err := earlier.Prepare(ctx, "p", outsideInsert)
			return err
		},
	}
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
		for name, send := range statements {
			require.ErrorIs(t, send(ctx), txn.ErrOutsideTransaction, name)
			derived, cancel := context.WithTimeout(ctx, time.Minute)
			require.ErrorIs(t, send(derived), txn.ErrOutsideTransaction, name)
			cancel()
			require.False(t, conn.Conn().IsClosed(), name)
			_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ('k')`)
			require.NoError(t, err, name)
		}
		return nil
	}))
	require.NoError(t, err)
	require.Len(t, seen.take(), 2*len(statements))
	_, err = earlier.Exec(t.Context(), outsideInsert, "later")
	require.NoError(t, err)
	require.NoError(t, earlier.Commit(t.Context()))
	require.Equal(t, 1, s.orders(t, "later"))
	require.Zero(t, s.orders(t, "outside"))
}
