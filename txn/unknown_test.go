package txn_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// cutter breaks a pool's connections at COMMIT, on the client's side of the wire.
type cutter struct {
	mode  atomic.Value // string: "", before, after, or down (no new connections)
	dials atomic.Int64
	cuts  atomic.Int64
}

var errCut = errors.New("cut by the test")

func (c *cutter) configure(config *pgxpool.Config) {
	c.mode.Store("")
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		c.dials.Add(1)
		if c.mode.Load() == "down" {
			return nil, errCut
		}
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &cutConn{Conn: conn, cutter: c}, nil
	}
}

type cutConn struct {
	net.Conn
	cutter *cutter
	cut    atomic.Bool
}

// Write sees our COMMIT as the Bind of its prepared statement, or as the Parse of an unnamed one.
func (c *cutConn) Write(b []byte) (int, error) {
	mode := c.cutter.mode.Load().(string)
	if mode == "" || mode == "down" || !bytes.Contains(b, []byte("pgonce_commit")) && !bytes.Contains(b, []byte("COMMIT\x00")) {
		return c.Conn.Write(b)
	}
	c.cutter.cuts.Add(1)
	c.cut.Store(true)
	c.cutter.mode.Store("")
	switch mode {
	case "before":
		_ = c.Close()
		return 0, errCut
	case "after then down":
		c.cutter.mode.Store("down")
	}
	n, err := c.Conn.Write(b)
	return n, err
}

func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b) // pgx may have begun it before the COMMIT was written
	if !c.cut.Load() {
		return n, err
	}
	// The server has answered, so the commit is done; the answer is lost.
	_ = c.Close()
	return 0, errCut
}

func newCutShop(t *testing.T, config ...func(*txn.Config)) (*shop, *cutter) {
	t.Helper()
	c := &cutter{}
	s := newShopWith(t, c.configure, config...)
	_, err := s.place(t.Context(), request(t, "warm", "up")) // connects and prepares
	require.NoError(t, err)
	return s, c
}

func TestCommit_LostAnswer(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"before", "after"} {
		t.Run(mode+" forwarding is resolved", func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			var events []idempotency.Event
			s, c := newCutShop(t, func(cfg *txn.Config) {
				cfg.OnEvent = func(_ context.Context, e idempotency.Event) {
					mu.Lock()
					defer mu.Unlock()
					events = append(events, e)
				}
			})
			for range 20 {
				key := "k" + time.Now().Format(time.RFC3339Nano)
				mu.Lock()
				events = nil
				mu.Unlock()
				c.mode.Store(mode)
				res, err := s.place(t.Context(), request(t, key, "body"))
				require.NoError(t, err)
				require.False(t, res.Replayed)
				require.Equal(t, key, res.Value.Key)
				require.Equal(t, 1, s.orders(t, key))
				again, err := s.place(t.Context(), request(t, key, "body"))
				require.NoError(t, err)
				require.Equal(t, res.Value, again.Value)

				mu.Lock()
				events = slices.DeleteFunc(events, func(e idempotency.Event) bool { _, restarted := e.(idempotency.Restarted); return restarted })
				require.IsType(t, idempotency.CommitUnknown{}, events[0])
				require.Equal(t, mode == "after", events[1].(idempotency.CommitResolved).Committed)
				executed := events[2].(idempotency.Executed)
				mu.Unlock()
				require.Equal(t, map[string]int{"before": 2, "after": 1}[mode], executed.Runs, "a commit that happened is never run again")
			}
			require.Equal(t, int64(20), c.cuts.Load())
		})
	}
}

func TestCommit_UnknownWhilePostgresIsAway(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t, func(cfg *txn.Config) { cfg.CommitTimeout = time.Second })
	c.mode.Store("after then down")
	dials := c.dials.Load()
	_, err := s.place(t.Context(), request(t, "k", "body"))
	require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
	require.Positive(t, c.dials.Load()-dials, "it has tried to ask")

	c.mode.Store("")
	res, err := s.place(t.Context(), request(t, "k", "body"))
	require.NoError(t, err)
	require.True(t, res.Replayed, "the commit had happened")
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestCommit_NoCancelRequestOnceSent(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t)
	before := c.dials.Load()
	c.mode.Store("after")
	_, err := s.place(t.Context(), request(t, "k", "body"))
	require.NoError(t, err)
	// One dial for the connection that asked what happened. pgx would have made another for its cancel request, which
	// ends a COMMIT's wait for its synchronous standby.
	require.Never(t, func() bool { return c.dials.Load()-before > 1 }, 300*time.Millisecond, 10*time.Millisecond)
}

func TestCommit_FunctionErrorAfterUnknownIsUnknown(t *testing.T) {
	t.Parallel()
	s, c := newCutShop(t)
	c.mode.Store("before")
	runs := 0
	boom := errors.New("boom")
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		if runs++; runs > 1 {
			return order{}, boom
		}
		return insertOrder(ctx, tx, "k")
	})
	// The bytes of the first COMMIT may still reach the server: only a record would prove that they cannot.
	require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
	require.ErrorIs(t, err, boom)
}

func TestCommit_DeferredConstraintIsADefiniteError(t *testing.T) {
	t.Parallel()
	s, _ := newCutShop(t)
	_, err := s.direct.Exec(t.Context(), `ALTER TABLE orders ADD CONSTRAINT one_note UNIQUE (note) DEFERRABLE INITIALLY DEFERRED;
		INSERT INTO orders (key, note) VALUES ('old', 'same')`)
	require.NoError(t, err)
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		_, err := tx.Exec(ctx, `INSERT INTO orders (key, note) VALUES ('k', 'same')`)
		return order{}, err
	})
	require.ErrorContains(t, err, "one_note")
	require.NotErrorIs(t, err, idempotency.ErrOutcomeUnknown)
	require.Zero(t, s.orders(t, "k"))
	_, found := s.record(t, request(t, "k", "body"))
	require.False(t, found)
}

func TestCommit_IsNotCancelledWithTheRequest(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := txn.WithIdempotency(ctx, s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		defer cancel() // the client hangs up when the work is done
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestRestart_ConnectionLostBeforeCommitRunsAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	runs := 0
	res, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		if runs++; runs == 1 {
			s.terminate(ctx, t, `pid = $1`, backend(ctx, t, tx))
		}
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.False(t, res.Replayed)
	require.Equal(t, 1, s.orders(t, "k"))
}
