package txn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Regression tests of what an adversarial review found. The ids are that review's.

// overheard collects a runner's events.
type overheard struct {
	mu     sync.Mutex
	events []idempotency.Event
}

func (o *overheard) configure(c *txn.Config) {
	c.OnEvent = func(_ context.Context, e idempotency.Event) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.events = append(o.events, e)
	}
}

// take returns the events since the last take.
func (o *overheard) take() (events []idempotency.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	events, o.events = o.events, nil
	return events
}

// noticed tells when somebody begins to wait for the context. A follower does so once it follows, and not before.
type noticed struct {
	context.Context
	waits func()
}

func (n noticed) Done() <-chan struct{} {
	n.waits()
	return n.Context.Done()
}

// backend is the server's process that runs the transaction; a pooler tells its clients other ids.
func backend(ctx context.Context, t testing.TB, tx pgx.Tx) (pid uint32) {
	t.Helper()
	require.NoError(t, tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid))
	return pid
}

// terminate ends sessions, and waits until they have ended. It uses a session of its own.
func (s *shop) terminate(ctx context.Context, t testing.TB, which string, args ...any) {
	t.Helper()
	conn, err := pgx.ConnectConfig(ctx, s.direct.Config().ConnConfig)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	tag, err := conn.Exec(ctx, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND `+which, args...)
	require.NoError(t, err)
	require.Positive(t, tag.RowsAffected())
}

func (s *shop) requireNoRecord(t testing.TB, req idempotency.Request) {
	t.Helper()
	_, found := s.record(t, req)
	require.False(t, found)
	require.Zero(t, s.orders(t, req.Key.Value()))
}

func TestFinding_B01_AnotherRunnersUnknownOutcomeIsTheFunctionsOwnError(t *testing.T) {
	t.Parallel()
	var heard overheard
	s := newShop(t, heard.configure)
	runs := 0
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		runs++
		o, err := insertOrder(ctx, tx, "k")
		return o, errors.Join(err, fmt.Errorf("payments: %w", idempotency.ErrOutcomeUnknown))
	})
	require.ErrorContains(t, err, "payments: ")
	require.Equal(t, 1, runs)
	events := heard.take()
	require.Len(t, events, 1)
	require.IsType(t, idempotency.RolledBack{}, events[0], "nothing of this call is unresolved")
	s.requireNoRecord(t, request(t, "k", "body"))
}

func TestFinding_B02_AnotherRunnersMismatchDoesNotResolveALostCommit(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t)
	c.mode.Store("before")
	runs := 0
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		if runs++; runs > 1 {
			return order{}, fmt.Errorf("payments: %w", idempotency.ErrMismatch)
		}
		return insertOrder(ctx, tx, "k")
	})
	require.Equal(t, 2, runs)
	require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
	require.ErrorContains(t, err, "payments: ")
}

func TestFinding_B03_FinalFailureOfAnInnerRunnerIsNotTheOuters(t *testing.T) {
	t.Parallel()
	outer := newShop(t)
	inner := outer.rival(t, create)
	refused := errors.New("card refused")
	for _, key := range []string{"inner failure is fresh", "inner failure is replayed"} {
		req := request(t, key, "body")
		_, err := txn.WithIdempotency(t.Context(), outer.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			_, err := insertOrder(ctx, tx, key)
			require.NoError(t, err)
			_, err = txn.WithIdempotency(ctx, inner.runner, request(t, "inner", "body"), func(context.Context, pgx.Tx) (order, error) {
				return order{}, txn.Final("card_refused", refused)
			})
			return order{}, fmt.Errorf("pay: %w", err)
		})
		var failed *idempotency.FailedError
		require.ErrorAs(t, err, &failed, key)
		require.Equal(t, "card_refused", failed.Code, key)
		outer.requireNoRecord(t, req)
	}
	r, found := inner.record(t, request(t, "inner", "body"))
	require.True(t, found)
	require.Equal(t, idempotency.StateFailed, r.State)
}

// longResult gives a result over the limit, and the answer of its COMMIT is lost.
func longResult[T any](t *testing.T, s *shop, c *cutter, key string, value T) {
	t.Helper()
	req := request(t, key, "body")
	cuts := c.cuts.Load()
	c.mode.Store("after")
	res, err := returning(t, s, req, value, nil)
	require.NoError(t, err)
	require.Equal(t, cuts+1, c.cuts.Load())
	require.False(t, res.Replayed)
	require.Equal(t, value, res.Value, "it is still in memory")
	_, err = returning(t, s, req, value, nil)
	require.ErrorIs(t, err, idempotency.ErrResultExpired)
	require.Equal(t, 1, s.orders(t, key))
}

func TestFinding_B06_C50_LostCommitOfATombstoneGivesTheValueInMemory(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: create.Name, ResultLimit: 10, Tombstone: true}}
	})
	longResult(t, s, c, "bytes", []byte("longer than ten bytes"))
	longResult(t, s, c, "json", "longer than ten bytes")
}

func TestFinding_B09_ResultsOfInterfaceTypes(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "any", "body")
	first, err := returning[any](t, s, req, []byte("hello"), nil)
	require.NoError(t, err)
	require.Equal(t, []byte("hello"), first.Value)
	again, err := returning[any](t, s, req, nil, nil)
	require.NoError(t, err, "it decodes as the JSON it was stored as")
	require.True(t, again.Replayed)
	require.Equal(t, "aGVsbG8=", again.Value)

	req = request(t, "error", "body")
	_, err = returning[error](t, s, req, errors.New("a value"), nil)
	require.ErrorContains(t, err, "return a concrete type")
	s.requireNoRecord(t, req)
}

func TestFinding_B10_FollowersGetTheirOwnCopies(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	clean := make([]byte, 200_000)
	for round := range 10 {
		req := request(t, fmt.Sprint("k", round), "body")
		entered, leave := make(chan struct{}), make(chan struct{})
		answers := make(chan error, 9)
		go func() {
			res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(context.Context, pgx.Tx) ([]byte, error) {
				close(entered)
				<-leave
				return bytes.Clone(clean), nil
			})
			for i := range res.Record.Result {
				res.Record.Result[i] = 'X' // as it may: they are its own
			}
			answers <- err
		}()
		<-entered
		var following sync.WaitGroup
		for range cap(answers) - 1 {
			following.Add(1)
			ctx := noticed{Context: t.Context(), waits: sync.OnceFunc(following.Done)}
			go func() {
				res, err := txn.WithIdempotency(ctx, s.runner, req, func(context.Context, pgx.Tx) ([]byte, error) {
					return nil, errors.New("second run")
				})
				if err == nil && (!res.Replayed || !bytes.Equal(clean, res.Value) || !bytes.Equal(clean, res.Record.Result)) {
					err = errors.New("the follower's bytes were overwritten")
				}
				answers <- err
			}()
		}
		following.Wait()
		close(leave)
		for range cap(answers) {
			require.NoError(t, <-answers)
		}
	}
}

func TestFinding_B11_NoWaitAnswersSoonAlsoOnAFullPool(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 }, impatient)
	h := s.hold(t, request(t, "k", "body"))
	const soon = 2 * time.Second
	soonest := time.Duration(math.MaxInt64)
	for try := 0; try < 3 && soonest >= soon; try++ { // one may meet a machine that has no time for it
		bounded, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		begin := time.Now()
		_, err := s.place(bounded, request(t, "k", "body"))
		soonest = min(soonest, time.Since(begin))
		cancel()
		require.ErrorIs(t, err, idempotency.ErrInProgress)
	}
	require.Less(t, soonest, soon, "it looks for 250 ms")
	require.NoError(t, h.letGo().err)
}

func TestFinding_B12_F70_LostCommitsAreBoundedByMaxRetries(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t)
	lose := func(cut string, retries, want int) {
		runner := newRunner(t, s.pool, func(c *txn.Config) { c.MaxRetries = retries })
		req, runs := request(t, fmt.Sprintf("%q %d", cut, retries), "body"), 0
		_, err := txn.WithIdempotency(t.Context(), runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			c.mode.Store(cut)
			return insertOrder(ctx, tx, req.Key.Value())
		})
		require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
		require.Equal(t, want, runs)
		s.requireNoRecord(t, req)
	}
	lose("before", -1, 1)
	lose("before", 2, 3)
	// The same, but it is the server that ends the session at COMMIT.
	s.exec(t, `CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(1); RETURN NULL; END $$`)
	s.exec(t, `CREATE CONSTRAINT TRIGGER die AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()`)
	lose("", -1, 1)
	lose("", 2, 3)
}

func TestFinding_C13_RetryOutlivesKilledIdleConnections(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, atLeastConns(3))
	req := request(t, "k", "body")
	first, err := s.place(t.Context(), req)
	require.NoError(t, err)
	for _, retry := range []bool{true, false} {
		var idle []*pgxpool.Conn
		for range 3 {
			conn, err := s.pool.Acquire(t.Context())
			require.NoError(t, err)
			idle = append(idle, conn)
		}
		for _, conn := range idle {
			conn.Release()
		}
		s.terminate(t.Context(), t, `true`)
		req.Retry = retry
		again, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		s.pool.Reset()
	}
}

func TestFinding_C15_ConnectionLostOverAnExpiredRecordRunsAgain(t *testing.T) {
	t.Parallel()
	var heard overheard
	s := newShop(t, heard.configure)
	req := request(t, "k", "body")
	old, err := s.place(t.Context(), req)
	require.NoError(t, err)
	s.expire(t, req, "-1 s")
	heard.take()
	runs := 0
	res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k")
		if runs++; runs == 1 {
			s.terminate(ctx, t, `pid = $1`, backend(ctx, t, tx))
		}
		return o, err
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.False(t, res.Replayed)
	require.Greater(t, res.Record.Generation, old.Record.Generation)
	require.Equal(t, 2, s.orders(t, "k"), "one of each generation")
	sent := slices.ContainsFunc(heard.take(), func(e idempotency.Event) bool { _, is := e.(idempotency.CommitUnknown); return is })
	// Unnamed statements are in one flush with COMMIT, which then was sent, if into the void.
	require.Equal(t, !s.named(), sent, "preparing the statement meets the lost connection before COMMIT")
}

func TestFinding_C16_IdleTimeoutEndsTheCallAfterOneRun(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, key := range []string{"met by the commit", "met by the function"} {
		runs := 0
		_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			o, err := insertOrder(ctx, tx, key)
			pid := backend(ctx, t, tx)
			// The whole session's would end it between any two statements, on a busy machine.
			_, set := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '200ms'`)
			require.NoError(t, set)
			require.Eventually(t, func() bool {
				var n int
				err := s.direct.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&n)
				return err == nil && n == 0
			}, patience, 10*time.Millisecond)
			if key == "met by the function" {
				_, err = tx.Exec(ctx, `SELECT 1`)
			}
			return o, err
		})
		var server *pgconn.PgError
		require.ErrorAs(t, err, &server, key)
		require.Equal(t, "25P03", server.Code, key)
		require.NotErrorIs(t, err, idempotency.ErrOutcomeUnknown, key)
		require.Equal(t, 1, runs, key)
		s.requireNoRecord(t, request(t, key, "body"))
	}
}

func TestFinding_C17_ContextThatOutlivesItsFunctionIsFree(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var kept context.Context
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		kept = context.WithoutCancel(ctx) // as a background job of a handler does
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	_, running := txn.FromContext(kept)
	require.False(t, running)
	_, err = s.place(kept, request(t, "later", "body"))
	require.NoError(t, err)
	require.Equal(t, 1, s.orders(t, "later"))
}
