package txn_test

import (
	"bytes"
	"context"
	"errors"
	"net"
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

// The same review's findings, continued: a transaction that is the caller's, or that the function ends or harms.

func TestFinding_B04_E44_ReplayWithinTheTransactionGoesWithIt(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for key, rollback := range map[string]func(whole, savepoint pgx.Tx) error{
		"whole transaction": func(whole, _ pgx.Tx) error { return whole.Rollback(t.Context()) },
		"savepoint only": func(whole, savepoint pgx.Tx) error {
			return errors.Join(savepoint.Rollback(t.Context()), whole.Commit(t.Context()))
		},
	} {
		req := request(t, key, "body")
		whole := s.begin(t, pgx.TxOptions{})
		savepoint, err := whole.Begin(t.Context())
		require.NoError(t, err)
		first, err := s.join(t.Context(), savepoint, req)
		require.NoError(t, err)
		second, err := s.join(t.Context(), savepoint, req)
		require.NoError(t, err)
		require.True(t, second.Replayed)
		require.NoError(t, rollback(whole, savepoint))
		require.ErrorIs(t, first.AfterCommit(t.Context()), idempotency.ErrNotRecorded, key)
		require.ErrorIs(t, second.AfterCommit(t.Context()), idempotency.ErrNotRecorded, key)
		s.requireNoRecord(t, req)
	}
}

func TestFinding_B05_SwallowedErrorLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	_, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k")
		_, _ = tx.Exec(ctx, `SELECT 1/0`)
		return o, err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	_, err = insertOrder(t.Context(), tx, "callers")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 1, s.orders(t, "callers"))
	s.requireNoRecord(t, request(t, "k", "body"))
}

func TestFinding_C37_SerializationFailureIsNeverRecordedAsFinal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `CREATE TABLE stock (n int)`)
	s.exec(t, `INSERT INTO stock VALUES (5)`)
	for key, cause := range map[string]func(error) error{
		"with its cause":    func(err error) error { return err },
		"without its cause": func(error) error { return errors.New("sold out") },
	} {
		tx := s.begin(t, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		_, err := tx.Exec(t.Context(), `SELECT n FROM stock`) // takes the snapshot
		require.NoError(t, err)
		s.exec(t, `UPDATE stock SET n = n - 1`)
		joined, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			_, err := tx.Exec(ctx, `UPDATE stock SET n = n - 1`)
			require.Error(t, err)
			return order{}, txn.Final("out_of_stock", cause(err))
		})
		require.ErrorIs(t, err, idempotency.ErrRestartOuter, key)
		require.NotErrorIs(t, err, idempotency.ErrFailed, key)
		require.Nil(t, joined, key)
		require.NoError(t, tx.Commit(t.Context()))
		s.requireNoRecord(t, request(t, key, "body"))
	}
}

// lateConn keeps a COMMIT back: its client is told that the connection broke, the server gets it when deliver is called.
type lateConn struct {
	net.Conn
	mu   sync.Mutex
	held []byte
}

func (c *lateConn) isHeld() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held != nil
}

func (c *lateConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil && !bytes.Contains(b, []byte("commit\x00")) {
		return c.Conn.Write(b)
	}
	if c.held == nil {
		c.held = bytes.Clone(b)
	}
	return 0, errCut
}

func (c *lateConn) Read(b []byte) (int, error) {
	if c.isHeld() {
		return 0, errCut
	}
	return c.Conn.Read(b)
}

func (c *lateConn) Close() error {
	if c.isHeld() {
		return nil
	}
	return c.Conn.Close()
}

func (c *lateConn) deliver() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.Conn.Write(c.held)
	return err
}

func TestFinding_F18_AfterCommitIsUnknownWhileTheCallersCommitIsOnItsWay(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	// The caller's connection is not of the runner's pool, and there is one of it: no cancel request disturbs the COMMIT.
	config := s.pool.Config().ConnConfig
	var late atomic.Pointer[lateConn]
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if late.Load() != nil {
			return nil, errCut
		}
		conn, err := dial(ctx, network, address)
		if err == nil {
			late.Store(&lateConn{Conn: conn})
		}
		return late.Load(), err
	}
	callers, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = late.Load().Conn.Close() })
	tx, err := callers.Begin(t.Context())
	require.NoError(t, err)
	joined, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)

	require.ErrorIs(t, tx.Commit(t.Context()), errCut)
	require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrOutcomeUnknown)
	require.NoError(t, late.Load().deliver())
	require.Eventually(t, func() bool { return s.orders(t, "k") == 1 }, patience, 5*time.Millisecond)
	require.NoError(t, joined.AfterCommit(t.Context()))
}

func TestFinding_C40_WaiterThatRunsItsFunctionCountsNoLonger(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t, func(c *txn.Config) { c.MaxWaiters = 1 })
	s := p.shop
	_, err := s.place(t.Context(), request(t, "warm", "body"))
	require.NoError(t, err)
	req := request(t, "k", "body")
	// Somebody else holds the key, and then fails.
	rival := s.replica(t)
	held, fail := make(chan struct{}), make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		_, err := txn.WithIdempotency(t.Context(), rival.runner, req, func(context.Context, pgx.Tx) (order, error) {
			close(held)
			<-fail
			return order{}, errors.New("no")
		})
		failed <- err
	}()
	<-held
	before := s.pool.Stat().AcquireCount()
	running, end := make(chan struct{}), make(chan struct{})
	ran := make(chan error, 1)
	go func() {
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(context.Context, pgx.Tx) (order, error) {
			close(running)
			<-end
			return order{}, nil
		})
		ran <- err
	}()
	// The second attempt proves that it waits.
	require.Eventually(t, func() bool { return s.pool.Stat().AcquireCount() >= before+2 }, patience, time.Millisecond)
	close(fail)
	require.Error(t, <-failed)
	select {
	case <-running:
	case err := <-ran:
		require.FailNow(t, "the waiter did not run", "%v", err)
	}

	const wait = time.Second // of those that come now
	p.policy(t, "all", "", "enforce")
	p.exec(t, `UPDATE idempotency.policies SET wait = $1`, wait)
	_, err = p.policies.RunOnce(t.Context())
	require.NoError(t, err)
	begin := time.Now()
	_, err = s.place(t.Context(), req)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	require.GreaterOrEqual(t, time.Since(begin), wait, "nobody waits: there is room for one")
	close(end)
	require.NoError(t, <-ran)
}

// ownCommits are the ways a function may send a COMMIT of its own.
var ownCommits = map[string]func(ctx context.Context, tx pgx.Tx, sql string) error{
	"Exec": func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Exec(ctx, sql)
		return err
	},
	"Query": func(ctx context.Context, tx pgx.Tx, sql string) error {
		rows, err := tx.Query(ctx, sql)
		rows.Close()
		return errors.Join(err, rows.Err())
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx, sql string) error {
		b := &pgx.Batch{}
		b.Queue(sql)
		return tx.SendBatch(ctx, b).Close()
	},
	"Conn": func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Conn().Exec(ctx, sql)
		return err
	},
}

func TestFinding_F06_F08_C51_OwnCommitIsSeenWhicheverWayItWasSent(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	t.Cleanup(func() { s.requireIdle(t) })
	for way, send := range ownCommits {
		for after, harm := range map[string]func(ctx context.Context, tx pgx.Tx) error{
			"deadlock": func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$`)
				return err
			},
			"lost connection": func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
				return err
			},
			"panic": func(context.Context, pgx.Tx) error { panic("boom") },
		} {
			key := way + ", then " + after
			t.Run(key, func(t *testing.T) {
				t.Parallel()
				req, runs := request(t, key, "body"), 0
				call := func() (err error) {
					_, err = txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
						runs++
						o, err := insertOrder(ctx, tx, key)
						require.NoError(t, err)
						require.NoError(t, send(ctx, tx, `COMMIT`))
						require.NoError(t, send(ctx, tx, `BEGIN`))
						return o, harm(ctx, tx)
					})
					return err
				}
				if after == "panic" {
					require.PanicsWithValue(t, "boom", func() { _ = call() })
				} else {
					require.ErrorIs(t, call(), idempotency.ErrTransactionEnded)
				}
				r, found := s.record(t, req)
				require.True(t, found)
				require.Equal(t, idempotency.StateFailed, r.State)
				require.Equal(t, txn.CodeTransactionEnded, r.ErrorCode)
				require.ErrorIs(t, call(), idempotency.ErrTransactionEnded, "a retry is told so")
				require.Equal(t, 1, runs)
				require.Equal(t, 1, s.orders(t, key))
			})
		}
	}
}

func TestFinding_F33_FunctionMayDeallocateEveryStatement(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	for _, key := range []string{"first", "on the same connection"} {
		runs := 0
		_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			o, err := insertOrder(ctx, tx, key)
			return o, errors.Join(err, tx.Conn().DeallocateAll(ctx))
		})
		require.NoError(t, err)
		if s.named() {
			require.Equal(t, 2, runs, "the second one is completed without named statements")
		} else {
			require.Equal(t, 1, runs, "there are none to lose")
		}
		require.Equal(t, 1, s.orders(t, key))
	}
}

func TestFinding_C21_ErrorsOfTheServicesTriggersAtCommitAreItsOwn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'the service says no' USING ERRCODE = NEW.key; END $$`)
	s.exec(t, `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION refuse()`)
	for _, code := range []string{"42P01", "42883", "42703", "25006", "ZP001", "ZP002", "23505", "57014", "P0001"} {
		runs := 0
		_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, code, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			return insertOrder(ctx, tx, code)
		})
		var server *pgconn.PgError
		require.ErrorAs(t, err, &server, code)
		require.Equal(t, code, server.Code)
		require.Equal(t, "the service says no", server.Message)
		for _, ours := range []error{
			idempotency.ErrSchema, idempotency.ErrReadOnly, idempotency.ErrTransactionEnded, idempotency.ErrRecordExists,
			idempotency.ErrRestart, idempotency.ErrOutcomeUnknown, idempotency.ErrFailed, idempotency.ErrAborted,
		} {
			require.NotErrorIs(t, err, ours, code)
		}
		require.Equal(t, 1, runs, code)
		s.requireNoRecord(t, request(t, code, "body"))
	}
}
