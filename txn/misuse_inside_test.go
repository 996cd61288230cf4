package txn_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// A runner called from inside its own function is refused, whichever way and whatever key; the function may go on.
func TestMisuse_SameRunnerInside(t *testing.T) {
	t.Parallel()
	for outside, outer := range ways {
		for _, key := range []string{"k", "other"} {
			t.Run(outside+"/"+key, func(t *testing.T) {
				t.Parallel()
				s := newShopWith(t, atLeastConns(4))
				_, err := outer(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
					_, err := s.place(ctx, request(t, key, "body"))
					require.ErrorIs(t, err, idempotency.ErrNested)
					_, err = s.join(ctx, tx, request(t, key, "body"))
					require.ErrorIs(t, err, idempotency.ErrNested)
					return nil
				}))
				require.NoError(t, err)
				s.requireSound(t, request(t, "k", "body"), true)
				require.Zero(t, s.orders(t, "other"))
			})
		}
	}
}

func TestMisuse_OtherRunnerInside(t *testing.T) {
	t.Parallel()
	for outside, outer := range ways {
		t.Run("another key, in the same transaction/"+outside, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool)}
			_, err := outer(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
				_, err := inner.join(ctx, tx, request(t, "other", "body"))
				return err
			}))
			require.NoError(t, err, "both are one commit")
			s.requireSound(t, request(t, "k", "body"), true)
			s.requireSound(t, request(t, "other", "body"), true)
		})
		t.Run("the same key, in the same transaction/"+outside, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool)}
			_, err := outer(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
				_, err := inner.join(ctx, tx, request(t, "k", "body"))
				return err
			}))
			require.ErrorIs(t, err, idempotency.ErrNested, "two records of one key in one transaction")
			s.requireSound(t, request(t, "k", "body"), false)
		})
		t.Run("another key, in its own transaction/"+outside, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool)}
			boom := errors.New("boom")
			_, err := outer(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
				_, err := inner.place(ctx, request(t, "other", "body"))
				return errors.Join(err, boom)
			}))
			require.ErrorIs(t, err, boom)
			s.requireSound(t, request(t, "k", "body"), false)
			s.requireSound(t, request(t, "other", "body"), true) // it has committed by itself
		})
		t.Run("the same key, in its own transaction/"+outside, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool, impatient)}
			_, err := outer(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
				_, err := inner.place(ctx, request(t, "k", "body"))
				return err
			}))
			require.ErrorIs(t, err, idempotency.ErrInProgress, "it waits for itself, as long as its Wait")
			s.requireSound(t, request(t, "k", "body"), false)
		})
		t.Run("on a pool of one/"+outside, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool)}
			_, err := inner.place(t.Context(), request(t, "warm", "body"))
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err = outer(ctx, s, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
				_, err := inner.place(ctx, request(t, "other", "body"))
				return err
			}))
			require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a connection that its own function holds")
			s.requireSound(t, request(t, "k", "body"), false)
		})
	}
}

// The pool is not the transaction: what is written through it stays, also when the function fails.
func TestMisuse_PoolInside(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			_, err := call(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
				_, err := s.pool.Exec(ctx, `INSERT INTO orders (key) VALUES ('outside')`)
				return errors.Join(err, boom)
			}))
			require.ErrorIs(t, err, boom)
			s.requireSound(t, request(t, "k", "body"), false)
			require.Equal(t, 1, s.orders(t, "outside"))
		})
		t.Run(way+", a pool of one", func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err := call(ctx, s, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
				_, err := s.pool.Exec(ctx, `INSERT INTO orders (key) VALUES ('outside')`)
				return err
			}))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			s.requireSound(t, request(t, "k", "body"), false)
			require.Zero(t, s.orders(t, "outside"))
		})
	}
}

// A goroutine that the function leaves behind meets a transaction that is over: never our completion, and never whatever
// the connection does next.
func TestMisuse_GoroutineOutlivesTheFunction(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			// COMMIT takes until the goroutine has tried while it runs.
			s.exec(t, `CREATE SEQUENCE tried`)
			s.exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				FOR i IN 1 .. 100 LOOP PERFORM pg_sleep(0.2); EXIT WHEN (SELECT is_called FROM tried); END LOOP; RETURN NULL; END $$`)
			s.exec(t, `CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
				WHEN (NEW.key = 'k') EXECUTE FUNCTION slow()`)
			committed, stop := make(chan struct{}), make(chan struct{})
			var refused int
			_, err := call(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
				begun := make(chan struct{})
				go func() {
					defer close(stop)
					for n := 0; ; n++ {
						if n == 3 {
							close(begun)
						}
						_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ('stray')`)
						if errors.Is(err, pgx.ErrTxClosed) {
							if refused++; refused == 3 {
								s.exec(t, `SELECT nextval('tried')`) //nolint:contextcheck // the test's own
							}
						}
						select {
						case <-committed:
							return
						default:
						}
					}
				}()
				<-begun
				return nil
			}))
			close(committed)
			<-stop
			require.NoError(t, err)
			require.Positive(t, refused)
			s.requireSound(t, request(t, "k", "body"), true)
			before := s.orders(t, "stray")
			require.GreaterOrEqual(t, before, 3, "those before the function returned are part of its commit")
			_, err = call(t.Context(), s, request(t, "k2", "body"), doing("k2", statements()))
			require.NoError(t, err)
			require.Equal(t, before, s.orders(t, "stray"))
		})
	}
}

// A function that goes on after its caller has hung up is not stopped: what it returns in the end counts.
func TestMisuse_FunctionIgnoresItsContext(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ctx, cancel := context.WithCancel(t.Context())
	deaf := doing("k", func(_ context.Context, tx pgx.Tx) error {
		cancel()
		_, err := tx.Exec(context.WithoutCancel(ctx), `SELECT pg_sleep(0.3)`)
		return err
	})
	res, err := txn.WithIdempotency(ctx, s.runner, request(t, "k", "body"), deaf)
	require.NoError(t, err, "COMMIT is not the request's")
	require.False(t, res.Replayed)
	s.requireSound(t, request(t, "k", "body"), true)

	// In a transaction of the caller its own statements and its COMMIT are on the context it gave.
	ctx, cancel = context.WithCancel(t.Context())
	_, err = ways["WithIdempotencyTx"](ctx, s, request(t, "joined", "body"), doing("joined", func(_ context.Context, tx pgx.Tx) error {
		cancel()
		_, err := tx.Exec(context.WithoutCancel(ctx), `SELECT pg_sleep(0.3)`)
		return err
	}))
	require.ErrorIs(t, err, context.Canceled)
	s.requireSound(t, request(t, "joined", "body"), false)
}

// The server ends the session of a function that sends nothing for too long: once, and the key is free.
func TestMisuse_SilentFunctionEndsWithTheIdleTimeout(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			runs := 0
			_, err := call(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
				runs++
				pid := backend(ctx, t, tx)
				// 60 s are too long for a test; and a short limit of the whole session could end other calls on a busy machine.
				require.NoError(t, statements(`SET LOCAL idle_in_transaction_session_timeout = '100ms'`)(ctx, tx))
				// Until the session is gone, seen from another one.
				require.Eventually(t, func() bool {
					var n int
					err := s.direct.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&n)
					return err == nil && n == 0
				}, patience, 20*time.Millisecond)
				return nil
			}))
			require.Error(t, err)
			require.NotErrorIs(t, err, idempotency.ErrOutcomeUnknown)
			require.Equal(t, 1, runs)
			s.requireSound(t, request(t, "k", "body"), false)
		})
	}
}

func TestMisuse_ValueThatDoesNotEncode(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	work := func(key string) func(context.Context, pgx.Tx) (chan int, error) {
		return func(ctx context.Context, tx pgx.Tx) (chan int, error) {
			_, err := insertOrder(ctx, tx, key)
			return make(chan int), err
		}
	}
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), work("k"))
	require.ErrorContains(t, err, "chan int")
	s.requireSound(t, request(t, "k", "body"), false)

	tx := s.begin(t, pgx.TxOptions{})
	_, err = insertOrder(t.Context(), tx, "callers")
	require.NoError(t, err)
	_, err = txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "joined", "body"), work("joined"))
	require.ErrorContains(t, err, "chan int")
	require.NoError(t, tx.Commit(t.Context()), "the caller may go on")
	require.Equal(t, 1, s.orders(t, "callers"))
	s.requireSound(t, request(t, "joined", "body"), false)
}

// In a transaction of the caller our statements are in pgx's cache, like the function's own. pgx's DeallocateAll empties
// that too; the SQL behind its back makes every later use of the connection a restart, until it is closed.
func TestMisuse_JoinedDeallocateAll(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	call := ways["WithIdempotencyTx"]
	for _, key := range []string{"k1", "k2"} {
		_, err := call(t.Context(), s, request(t, key, "body"), doing(key, func(ctx context.Context, tx pgx.Tx) error {
			return tx.Conn().DeallocateAll(ctx)
		}))
		require.NoError(t, err)
		s.requireSound(t, request(t, key, "body"), true)
	}
	_, err := call(t.Context(), s, request(t, "warm", "body"), doing("warm", statements()))
	require.NoError(t, err)
	_, err = call(t.Context(), s, request(t, "k3", "body"), doing("k3", statements(`DEALLOCATE ALL`)))
	require.ErrorIs(t, err, idempotency.ErrRestartOuter)
	_, err = call(t.Context(), s, request(t, "k3", "body"), doing("k3", statements()))
	require.ErrorIs(t, err, idempotency.ErrRestart, "the connection has lost more of them")
	s.pool.Reset()
	s.requireSound(t, request(t, "k3", "body"), false)
}
