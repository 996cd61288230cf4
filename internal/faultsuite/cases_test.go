package faultsuite

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

// Cases of the field, under real faults. Each test carries its case's id.

// The steps of a call at which its process dies.
const (
	dieAcquired  = "the key is acquired"
	diePlaced    = "the order is placed, not committed"
	dieOnTheWay  = "COMMIT is on its way, and is lost"
	dieDelivered = "COMMIT is on its way, and arrives"
	dieCommitted = "it is committed, nobody was told"
)

type dyingArgs struct{ URL, Key, Die string }

// dying places one order and does not live to tell: it kills itself at a step, or says that it got there and waits.
var dying = childtest.Register("dying", func(ctx context.Context, a dyingArgs, tell func(string)) error {
	pool, err := connect(ctx, a.URL, options{})
	if err != nil {
		return err
	}
	defer pool.Close()
	kill := func(at string) {
		if a.Die == at {
			_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
			select {} // another thread may be taking it
		}
	}
	r, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}, OnEvent: func(_ context.Context, e idempotency.Event) {
		switch e.(type) {
		case idempotency.CommitUnknown:
			tell("lost")
			select {} // until the parent kills us
		case idempotency.Executed:
			kill(dieCommitted)
		}
	}})
	if err != nil {
		return err
	}
	req, err := request(a.Key)
	if err != nil {
		return err
	}
	_, err = txn.WithIdempotency(ctx, r, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		kill(dieAcquired)
		o, err := insertOrder(ctx, tx, a.Key)
		kill(diePlaced)
		if a.Die == "" {
			tell("holds")
			select {} // until the parent kills us
		}
		return o, err
	})
	return err
})

// Whatever the step, the retry places the order or replays it, and a record is there if and only if the order is.
func TestCase_R10_ProcessKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	for die, committed := range map[string]bool{
		dieAcquired: false, diePlaced: false, dieOnTheWay: false, dieDelivered: true, dieCommitted: true,
	} {
		t.Run(die, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, options{})
			other := s.another(t)
			held := die == dieOnTheWay || die == dieDelivered
			if held {
				s.proxy.Next(pgproxy.Rule{Do: pgproxy.HoldBytes, WholeFlush: true})
			}
			child := dying.Start(t, dyingArgs{URL: s.proxy.URL(s.direct.Config().ConnString()), Key: "k", Die: die})
			if held {
				child.Await(t, func(said string) bool { return said == "lost" })
				child.Kill(t)
			}
			require.ErrorIs(t, child.Wait(t), childtest.ErrKilled)
			if held {
				s.let(t, die == dieDelivered)
			}
			res := s.placeUntilFree(t, other, "k")
			require.Equal(t, committed, res.Replayed)
			s.check(t, &tally{}, 2, nil)
		})
	}
}

// loser is a connection that loses the answer to whatever carries its marker, once.
type loser struct {
	net.Conn
	marker []byte
	armed  *atomic.Bool
	losing atomic.Bool
}

var errLost = errors.New("answer lost by the test")

func (l *loser) Write(b []byte) (int, error) {
	if bytes.Contains(b, l.marker) && l.armed.CompareAndSwap(true, false) {
		l.losing.Store(true)
	}
	return l.Conn.Write(b)
}

func (l *loser) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if l.losing.Load() { // the server has done it
		_ = l.Close()
		return 0, errLost
	}
	return n, err
}

// losing is a runner that loses one answer to a prepared statement, when armed.
func (s *shop) losing(t *testing.T, marker string, config *txn.Config) (r *txn.Runner, armed *atomic.Bool) {
	t.Helper()
	armed = &atomic.Bool{}
	cfg, err := pgxpool.ParseConfig(s.direct.Config().ConnString())
	require.NoError(t, err)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		// As a Bind has it, and no Parse.
		return &loser{Conn: conn, marker: []byte("\x00" + marker + "\x00"), armed: armed}, nil
	}
	txn.ConfigurePool(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	r, err = txn.New(pool, config)
	require.NoError(t, err)
	_, err = s.place(t.Context(), r, "warm") // connects and prepares
	require.NoError(t, err)
	return r, armed
}

// An owner whose answer is lost, to its acquisition or its COMMIT, is never told to wait for itself.
func TestCase_R14_OwnerIsNeverItsOwnRival(t *testing.T) {
	t.Parallel()
	for marker, committed := range map[string]bool{"pgonce_lock": false, "pgonce_commit": true} {
		t.Run(marker, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, options{})
			heard := &events{}
			impatient := create
			impatient.Wait = idempotency.NoWait
			r, armed := s.losing(t, marker, &txn.Config{Operations: []idempotency.Operation{impatient}, OnEvent: heard.add})
			n := scaled(10, 100)
			for i := range n {
				heard.take()
				armed.Store(true)
				res, err := s.place(t.Context(), r, names("k", n)[i])
				require.False(t, armed.Load(), "an answer was lost")
				require.NoError(t, err)
				require.False(t, res.Replayed)
				said := heard.take()
				require.Equal(t, 1, only[idempotency.Executed](t, said).Runs, "acquired is not run, committed is not run again")
				if committed {
					require.True(t, only[idempotency.CommitResolved](t, said).Committed)
				} else {
					only[idempotency.Restarted](t, said)
				}
			}
			s.check(t, &tally{}, n, nil)
		})
	}
}

// COMMIT's answer comes after the caller's deadline, or COMMIT never arrives.
func TestCase_P01_AnswerToCommitAfterTheDeadline(t *testing.T) {
	t.Parallel()
	t.Run("it waits for a late answer", func(t *testing.T) {
		t.Parallel()
		s := newShop(t, options{})
		var late atomic.Bool
		// A busy machine may not get to COMMIT in time: then again, with more of it.
		for limit := 500 * time.Millisecond; !late.Load(); limit *= 2 {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			deadline, _ := ctx.Deadline()
			s.proxy.Decide(func(pgproxy.Commit) pgproxy.Rule {
				late.Store(true)
				return pgproxy.Rule{Do: pgproxy.DelayReply, Delay: time.Until(deadline) + 500*time.Millisecond}
			})
			res, err := s.place(ctx, s.runner, "k")
			ended := ctx.Err()
			cancel()
			if !late.Load() {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				continue
			}
			require.Error(t, ended)
			require.NoError(t, err)
			require.False(t, res.Replayed)
		}
		s.check(t, &tally{}, 2, nil)
	})
	t.Run("it looks for what a later one has done", func(t *testing.T) {
		t.Parallel()
		s := newShop(t, options{config: shortCommitTimeout})
		s.events.take()
		s.proxy.Next(pgproxy.Rule{Do: pgproxy.DelayReply, Delay: time.Minute})
		res, err := s.place(t.Context(), s.runner, "k")
		require.NoError(t, err)
		require.False(t, res.Replayed)
		said := s.events.take()
		require.True(t, only[idempotency.CommitResolved](t, said).Committed)
		require.Equal(t, 1, only[idempotency.Executed](t, said).Runs)
		require.Zero(t, s.proxy.Stats().Cancels)
		s.check(t, &tally{}, 2, nil)
	})
	t.Run("a COMMIT that never arrives is unknown to a caller whose time is over", func(t *testing.T) {
		t.Parallel()
		s := newShop(t, options{})
		other := s.another(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s.events.on(func(e idempotency.Event) {
			if _, unknown := e.(idempotency.CommitUnknown); unknown {
				cancel()
			}
		})
		s.proxy.Next(pgproxy.Rule{Do: pgproxy.CutBefore})
		_, err := s.place(ctx, s.runner, "k")
		require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown, "no second run for a client that is gone")
		res := s.placeUntilFree(t, other, "k")
		require.False(t, res.Replayed)
		s.check(t, &tally{}, 2, nil)
	})
}

// A cancelled request leaves no session in a transaction, and nothing that its retry would have to wait for.
func TestCase_P13_CancelledInAQuery(t *testing.T) {
	t.Parallel()
	errHungUp := errors.New("the client hung up")
	for name, sleep := range map[string]func(ctx context.Context, tx pgx.Tx, cancel func()) error{
		"in a query": func(ctx context.Context, tx pgx.Tx, cancel func()) error {
			time.AfterFunc(100*time.Millisecond, cancel)
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		},
		"between queries": func(ctx context.Context, _ pgx.Tx, cancel func()) error {
			cancel()
			return context.Cause(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, options{})
			other := s.another(t)
			req, err := request("k")
			require.NoError(t, err)
			connections := s.pool.Stat().NewConnsCount()
			ctx, cancel := context.WithCancelCause(t.Context())
			_, err = txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				o, err := insertOrder(ctx, tx, "k")
				return o, errors.Join(err, sleep(ctx, tx, func() { cancel(errHungUp) }))
			})
			require.ErrorIs(t, err, errHungUp)
			began := time.Now()
			res, err := s.place(t.Context(), other, "k")
			require.NoError(t, err)
			require.False(t, res.Replayed)
			require.Less(t, time.Since(began), time.Second, "the retry is not held up")
			require.Eventually(t, func() bool {
				var n int
				err := s.direct.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
					WHERE datname = current_database() AND state LIKE 'idle in transaction%'`).Scan(&n)
				return err == nil && n == 0
			}, time.Second, 10*time.Millisecond)
			if name == "between queries" {
				_, err = s.place(t.Context(), s.runner, "k2")
				require.NoError(t, err)
				require.Equal(t, connections, s.pool.Stat().NewConnsCount(), "ROLLBACK was sent, and the connection is still good")
			}
			s.check(t, &tally{}, 2, nil)
		})
	}
}

// An owner may hold its key for long, and die with it. Duplicates are told so in time, and hold no connection meanwhile.
// (A leased owner, which leaves a record behind, belongs to the leased mode.)
func TestCase_P23_LongOwnerDies(t *testing.T) {
	t.Parallel()
	const wait = 2 * time.Second
	s := newShop(t, options{wait: wait})
	owner := dying.Start(t, dyingArgs{URL: s.direct.Config().ConnString(), Key: "k"})
	owner.Await(t, func(said string) bool { return said == "holds" })

	const duplicates = 50 // on 8 connections
	answers := make(chan error, duplicates)
	began := time.Now()
	for range duplicates {
		go func() {
			_, err := s.place(t.Context(), s.runner, "k")
			answers <- err
		}()
	}
	served := 0
	for len(answers) == 0 { // while they wait, others are served
		_, err := s.place(t.Context(), s.runner, names("other", served+1)[served])
		require.NoError(t, err)
		served++
	}
	require.Positive(t, served)
	for range duplicates {
		err := <-answers
		var busy *idempotency.InProgressError
		require.ErrorAs(t, err, &busy)
		require.GreaterOrEqual(t, busy.RetryAfter, time.Second)
	}
	require.GreaterOrEqual(t, time.Since(began), wait)

	owner.Kill(t)
	require.ErrorIs(t, owner.Wait(t), childtest.ErrKilled)
	res, err := s.place(t.Context(), s.runner, "k")
	require.NoError(t, err, "its session ends with its process, and the key is free")
	require.False(t, res.Replayed)
	s.check(t, &tally{}, served+2, nil)
}
