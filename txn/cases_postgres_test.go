package txn_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func (s *shop) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := s.direct.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func TestCase_P04_LosingAbortsNoTransactionSomebodyNeeds(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	done, running := request(t, "done", "body"), request(t, "running", "body")
	first, err := s.place(t.Context(), done)
	require.NoError(t, err)
	h := s.replica(t).hold(t, running)

	// In a transaction of the caller.
	err = pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `INSERT INTO orders (key) VALUES ('outer')`)
		require.NoError(t, err)
		place := func(req idempotency.Request) (*txn.Joined[order], error) {
			return txn.WithIdempotencyTx(t.Context(), s.runner, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				return insertOrder(ctx, tx, req.Key.Value())
			})
		}
		again, err := place(done)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		_, err = place(running)
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		_, err = tx.Exec(t.Context(), `INSERT INTO orders (key) VALUES ('outer')`)
		return err
	})
	require.NoError(t, err)
	require.Equal(t, 2, s.orders(t, "outer"))
	require.NoError(t, h.letGo().err)
	require.Equal(t, 1, s.orders(t, "done"))
	require.Equal(t, 1, s.orders(t, "running"))
}

func TestCase_P04_FunctionHandlesItsOwnViolationInASavepoint(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `CREATE TABLE customers (name text PRIMARY KEY)`)
	s.exec(t, `INSERT INTO customers VALUES ('ann')`)
	req := request(t, "k1", "body")
	res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO customers VALUES ('ann')`)
			return err
		})
		var violation *pgconn.PgError
		require.ErrorAs(t, err, &violation)
		require.Equal(t, "23505", violation.Code)
		return insertOrder(ctx, tx, "k1")
	})
	require.NoError(t, err)
	r, found := s.record(t, req)
	require.True(t, found)
	require.Equal(t, res.Record, r)
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestCase_P06_EveryRaceEndsInExactlyOneKnownAnswer(t *testing.T) {
	t.Parallel()
	loops := scaled(t, 1500, 10_000)
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			raceLoops(t, iso, loops/2)
		})
	}
}

// raceLoops lets a first call, a duplicate and another payload meet at one key, many times.
func raceLoops(t *testing.T, iso pgx.TxIsoLevel, loops int) {
	t.Helper()
	s := newShop(t, isolated(iso))
	late := s.replica(t, isolated(iso), impatient)
	const workers = 4
	var next, replays, busy atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, workers)
	for range workers {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(loops) {
					return
				}
				if err := raceOnce(t, s, late, fmt.Sprintf("k%d", i), &replays, &busy); err != nil {
					errs <- fmt.Errorf("loop %d: %w", i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	var orders, keys, records int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT key),
		(SELECT count(*) FROM idempotency.records WHERE state = 'SUCCESS') FROM orders`).Scan(&orders, &keys, &records))
	require.Equal(t, loops, orders)
	require.Equal(t, loops, keys)
	require.Equal(t, loops, records)
	t.Logf("%d loops: %d replays, %d in progress", loops, replays.Load(), busy.Load())
}

func raceOnce(t *testing.T, s, late *shop, key string, replays, busy *atomic.Int64) error {
	t.Helper()
	place := func(s *shop, body string) error {
		req := request(t, key, body)
		res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			o, err := insertOrder(ctx, tx, key)
			jitter(500 * time.Microsecond)
			return o, err
		})
		switch {
		case errors.Is(err, idempotency.ErrInProgress):
			busy.Add(1)
		case errors.Is(err, idempotency.ErrMismatch):
		case err != nil:
			return fmt.Errorf("%s: %w", body, err)
		case res.Replayed:
			replays.Add(1)
		}
		return nil
	}
	var wg sync.WaitGroup
	results := make([]error, 3)
	for i, call := range []struct {
		shop *shop
		body string
	}{{s, "body"}, {late, "body"}, {late, "other body"}} {
		wg.Go(func() {
			if i > 0 {
				jitter(3 * time.Millisecond)
			}
			results[i] = place(call.shop, call.body)
		})
	}
	wg.Wait()
	return errors.Join(results...)
}

func TestCase_P07_OnlyOurOwnKeyMakesADuplicate(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	// As near to ours as names can be.
	s.exec(t, `CREATE TABLE idempotency_orders (ref text CONSTRAINT idempotency_key UNIQUE)`)
	s.exec(t, `CREATE SCHEMA other; CREATE TABLE other.records (ref text CONSTRAINT records_pkey PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)`)
	s.exec(t, `INSERT INTO idempotency_orders VALUES ('r1'); INSERT INTO other.records VALUES ('r1')`)
	for _, c := range []struct{ key, sql, schema, table, constraint string }{
		{"statement", `INSERT INTO idempotency_orders VALUES ('r1')`, "public", "idempotency_orders", "idempotency_key"},
		{"commit", `INSERT INTO other.records VALUES ('r1')`, "other", "records", "records_pkey"}, // deferred: COMMIT raises it
	} {
		req, runs := request(t, c.key, "body"), 0
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			o, err := insertOrder(ctx, tx, c.key)
			if err != nil {
				return o, err
			}
			_, err = tx.Exec(ctx, c.sql)
			return o, err
		})
		var violation *pgconn.PgError
		require.ErrorAs(t, err, &violation, c.key)
		require.Equal(t, []string{"23505", c.schema, c.table, c.constraint},
			[]string{violation.Code, violation.SchemaName, violation.TableName, violation.ConstraintName})
		for _, ours := range []error{idempotency.ErrRecordExists, idempotency.ErrInProgress, idempotency.ErrOutcomeUnknown} {
			require.NotErrorIs(t, err, ours)
		}
		require.Equal(t, 1, runs)
		require.Zero(t, s.orders(t, c.key))
		_, found := s.record(t, req)
		require.False(t, found)
	}
	s.requireIdle(t)
}

func TestCase_P07_RecordOfAnotherWriterIsReplayed(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			s := newShop(t, isolated(iso))
			req, runs := request(t, "k1", "body"), 0
			res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				runs++
				s.plantSuccess(ctx, t, req, `{"id":77,"key":"k1"}`) // without the lock: only the unique key is left
				return insertOrder(ctx, tx, "k1")
			})
			require.NoError(t, err)
			require.True(t, res.Replayed)
			require.Equal(t, order{ID: 77, Key: "k1"}, res.Value)
			require.Equal(t, 1, runs)
			require.Zero(t, s.orders(t, "k1"))
			s.requireIdle(t)
		})
	}
}

// plantSuccess writes a record as a program that knows no lock would.
func (s *shop) plantSuccess(ctx context.Context, t testing.TB, req idempotency.Request, result string) {
	t.Helper()
	token := idempotency.NewAttemptToken()
	_, err := s.direct.Exec(ctx, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
			completed_at, expires_at, fingerprint, attempt_token, executor, result_type, result)
		SELECT $1, $2, $3, 'SUCCESS', f, f, 1, now(), now(), now(), now() + interval '1 day', $4, $5, 'sql', 'json/1', $6
		FROM nextval('idempotency.fence') AS f`,
		req.Key.Tenant(), req.Key.Operation(), req.Key.Value(), req.Fingerprint.Bytes(), token[:], []byte(result))
	require.NoError(t, err)
}

func TestCase_P08_LosingARaceIsATypedAnswer(t *testing.T) {
	t.Parallel()
	s := newShop(t, impatient)
	one, two := s.replica(t, impatient), s.replica(t, impatient)
	const keys = 50
	for i := range keys {
		req := request(t, fmt.Sprintf("k%d", i), "body")
		gate, answers := make(chan struct{}), make(chan answer, 2)
		for _, r := range []*shop{one, two} {
			go func() {
				<-gate
				res, err := r.place(t.Context(), req)
				answers <- answer{res, err}
			}()
		}
		close(gate)
		fresh := 0
		for range 2 {
			switch a := <-answers; {
			case a.err == nil && !a.Replayed:
				fresh++
			case a.err != nil:
				var busy *idempotency.InProgressError
				require.ErrorAs(t, a.err, &busy)
				require.Equal(t, req.Key, busy.Key)
			}
		}
		require.Equal(t, 1, fresh)
	}
	var n int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM orders`).Scan(&n))
	require.Equal(t, keys, n)
}

func TestCase_P10_DeadlockOfTwoFunctionsIsRetried(t *testing.T) {
	t.Parallel()
	var restarts atomic.Int64
	s := newShopWith(t, func(c *pgxpool.Config) {
		atLeastConns(2)(c)
		c.ConnConfig.RuntimeParams["deadlock_timeout"] = "20ms"
	}, func(c *txn.Config) {
		c.OnEvent = func(_ context.Context, e idempotency.Event) {
			if r, ok := e.(idempotency.Restarted); ok && strings.Contains(r.Err.Error(), "40P01") {
				restarts.Add(1)
			}
		}
	})
	s.exec(t, `CREATE TABLE accounts (id text PRIMARY KEY, balance int NOT NULL)`)
	s.exec(t, `INSERT INTO accounts VALUES ('A', 100), ('B', 100)`)
	met := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	transfer := func(i int, from, to string) error {
		req, runs := request(t, "from "+from, "body"), 0
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			if _, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = $1`, from); err != nil {
				return order{}, err
			}
			if runs == 1 { // both have their first row before either asks for the second
				close(met[i])
				<-met[1-i]
			}
			if _, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + 10 WHERE id = $1`, to); err != nil {
				return order{}, err
			}
			return insertOrder(ctx, tx, "transfer")
		})
		return err
	}
	errs := make(chan error, 2)
	go func() { errs <- transfer(0, "A", "B") }()
	go func() { errs <- transfer(1, "B", "A") }()
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
	require.Positive(t, restarts.Load(), "there was a deadlock")
	require.Equal(t, 2, s.orders(t, "transfer"))
	var a, b int
	require.NoError(t, s.direct.QueryRow(t.Context(),
		`SELECT min(balance), max(balance) FROM accounts`).Scan(&a, &b))
	require.Equal(t, []int{100, 100}, []int{a, b})
}
