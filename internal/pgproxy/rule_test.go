package pgproxy

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRule_PassThroughCountsOnly(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		for _, key := range []string{"a", "b", "c"} {
			a := b.order(t, c, p, key)
			require.NoError(t, a.insert)
			require.NoError(t, a.commit)
			require.Equal(t, "COMMIT", a.tag)
			require.Equal(t, 1, b.orders(t, key))
		}
		require.Equal(t, Stats{Connections: 1, Commits: 3}, b.proxy.Stats())
	}
}

func TestRule_CutBeforeCommitsNothing(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		for b := range each(t) {
			c, p := b.c, b.p
			b.proxy.Next(Rule{Do: CutBefore, WholeFlush: whole})
			a := b.order(t, c, p, "k")
			requireLost(t, a)
			b.requireBackend(t, c, "") // what has ended can commit no more
			require.Zero(t, b.orders(t, "k"))
			require.EqualValues(t, 1, b.proxy.Stats().Cut)

			// The rule was for one commit.
			require.NoError(t, b.order(t, b.connect(t), p, "k").commit)
			require.Equal(t, 1, b.orders(t, "k"))
		}
	}
}

func TestRule_CutAfterCommitsAndAnswersNothing(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		b.proxy.Next(Rule{Do: CutAfter})
		a := b.order(t, c, p, "k")
		requireLost(t, a)
		require.Empty(t, c.recorder.received(), "not even the insert's answer, which is in the same flush")
		require.Equal(t, 1, b.orders(t, "k"))
		require.EqualValues(t, 1, b.proxy.Stats().Cut)
	}
}

func TestRule_CutAfterOfACommitThatIsRefused(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		_, err := b.pool.Exec(t.Context(), "ALTER TABLE orders ADD UNIQUE (key) DEFERRABLE INITIALLY DEFERRED; INSERT INTO orders VALUES ('k')")
		require.NoError(t, err)
		b.proxy.Next(Rule{Do: CutAfter})
		requireLost(t, b.order(t, c, p, "k"))
		require.Equal(t, 1, b.orders(t, "k"))
	}
}

func TestRule_CutInReplyGivesTheFirstBytes(t *testing.T) {
	t.Parallel()
	const parsed, bound = "1\x00\x00\x00\x04", "2\x00\x00\x00\x04n\x00\x00\x00\x04"
	const whole = "C\x00\x00\x00\x0bCOMMIT\x00Z\x00\x00\x00\x05I"
	for b := range each(t) {
		c, p := b.c, b.p
		b.proxy.Next(Rule{Do: CutInReply}, Rule{Do: CutInReply, Bytes: 1}, Rule{Do: CutInReply, Bytes: 1000})
		a := b.order(t, c, p, "half")
		require.NoError(t, a.insert, "it was answered before")
		requireLost(t, a)
		full := map[string]string{"simple": "", "named": bound, "unnamed": parsed + bound}[p.name] + whole
		_, got, found := strings.Cut(c.recorder.received(), "Z\x00\x00\x00\x05T") // ends the insert's answer
		if !found {
			got = c.recorder.received()
		}
		require.Equal(t, full[:len(full)/2], got)
		require.Equal(t, 1, b.orders(t, "half"))

		c = b.connect(t)
		requireLost(t, b.order(t, c, p, "byte"))
		require.Equal(t, 1, b.orders(t, "byte"))

		c = b.connect(t)
		require.NoError(t, b.order(t, c, p, "all").commit)
		require.True(t, strings.HasSuffix(c.recorder.received(), whole))
		// The client had its whole answer before the cut.
		require.Eventually(t, func() bool { return b.proxy.Stats().Cut == 3 }, 10*time.Second, time.Millisecond)
	}
}

func TestRule_DelayReplyGivesItLater(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		b.proxy.Next(Rule{Do: DelayReply, Delay: 200 * time.Millisecond})
		start := time.Now()
		a := b.order(t, c, p, "k")
		require.NoError(t, a.commit)
		require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
		require.Zero(t, b.proxy.Stats().Cut)

		b.proxy.Next(Rule{Do: DelayReply, Delay: time.Hour})
		_, err := c.Exec(t.Context(), "BEGIN").ReadAll()
		require.NoError(t, err)
		ctx, giveUp := context.WithCancel(t.Context())
		late := make(chan answers, 1)
		go func() { late <- p.send(ctx, c, "late") }()
		require.Eventually(t, func() bool { return b.orders(t, "late") == 1 }, 10*time.Second, time.Millisecond)
		select {
		case a = <-late:
			require.Fail(t, "the answer was not kept", "%v", a)
		case <-time.After(50 * time.Millisecond):
		}
		giveUp()
		require.Error(t, (<-late).commit)
		require.Equal(t, 1, b.orders(t, "late"))
	}
}

func TestRule_HoldBytesCommitsOnRelease(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		for b := range each(t) {
			c, p := b.c, b.p
			b.proxy.Next(Rule{Do: HoldBytes, WholeFlush: whole})
			requireLost(t, b.order(t, c, p, "k"))
			b.requireBackend(t, c, "idle in transaction")
			require.Zero(t, b.orders(t, "k"))
			require.Equal(t, 1, b.proxy.Held())

			require.NoError(t, b.proxy.Release(t.Context()))
			require.Equal(t, 1, b.orders(t, "k"))
			require.Zero(t, b.proxy.Held())
			b.requireBackend(t, c, "")
		}
	}
}

func TestRule_HoldBytesCommitsNothingOnDrop(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		b.proxy.Next(Rule{Do: HoldBytes})
		require.Error(t, b.order(t, c, p, "k").commit)
		b.requireBackend(t, c, "idle in transaction")
		b.proxy.Drop()
		b.requireBackend(t, c, "")
		require.Zero(t, b.orders(t, "k"))
		require.NoError(t, b.proxy.Release(t.Context()), "nothing is held any more")
	}
}

func TestRule_HoldBytesToldThatTheServerWentAway(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	c := b.connect(t)
	b.proxy.Next(Rule{Do: HoldBytes})
	require.Error(t, b.order(t, c, protocols[1], "k").commit)
	_, err := b.pool.Exec(t.Context(), "SELECT pg_terminate_backend($1)", c.PID())
	require.NoError(t, err)
	b.requireBackend(t, c, "")
	require.ErrorIs(t, b.proxy.Release(t.Context()), errServerClosed)
	require.Zero(t, b.orders(t, "k"))
}

func TestRule_HalfFlushBreaksAnywhere(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		for _, bytes := range []int{0, 1, 4, 5, 9, 21} {
			c := b.connect(t)
			b.proxy.Next(Rule{Do: HalfFlush, Bytes: bytes})
			requireLost(t, b.order(t, c, b.p, "k"))
			if bytes < 12 { // else the simple COMMIT is whole
				require.NotEmpty(t, b.backend(t, c), "it waits for the rest")
				require.Zero(t, b.orders(t, "k"))
			}
			require.NoError(t, b.proxy.Release(t.Context()))
			require.Equal(t, 1, b.orders(t, "k"), "%d bytes", bytes)
			_, err := b.pool.Exec(t.Context(), "TRUNCATE orders")
			require.NoError(t, err)
		}
		c := b.connect(t)
		b.proxy.Next(Rule{Do: HalfFlush})
		requireLost(t, b.order(t, c, b.p, "k"))
		b.proxy.Drop()
		b.requireBackend(t, c, "")
		require.Zero(t, b.orders(t, "k"))
	}
}

func TestRule_ResetIsSeenByTheClient(t *testing.T) {
	t.Parallel()
	for b := range each(t) {
		c, p := b.c, b.p
		b.proxy.Next(Rule{Do: CutAfter, Reset: true})
		requireLost(t, b.order(t, c, p, "k"))
		require.ErrorIs(t, c.recorder.broken(), syscall.ECONNRESET)
		require.Equal(t, 1, b.orders(t, "k"))
	}
}

func TestRules_QueuedOnesComeBeforeTheStandingOne(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	var mu sync.Mutex
	var decided []Commit
	b.proxy.Decide(func(c Commit) Rule {
		mu.Lock()
		defer mu.Unlock()
		decided = append(decided, c)
		if c.Number%2 == 0 {
			return Rule{Do: CutAfter}
		}
		return Rule{}
	})
	b.proxy.Times(2, Rule{Do: CutBefore})
	b.proxy.Next(Rule{})
	require.Equal(t, 3, b.proxy.Waiting())

	var cut []bool
	for i := range 6 {
		a := b.order(t, b.connect(t), protocols[i%3], "k")
		cut = append(cut, a.commit != nil)
	}
	require.Equal(t, []bool{true, true, false, true, false, true}, cut)
	require.Zero(t, b.proxy.Waiting())
	require.Equal(t, []Commit{
		{Number: 4, Connection: 4, Simple: true},
		{Number: 5, Connection: 5, Statement: "the_commit"},
		{Number: 6, Connection: 6},
	}, decided)

	b.proxy.Always(Rule{Do: CutBefore})
	require.Error(t, b.order(t, b.connect(t), protocols[0], "k").commit)
	b.proxy.Decide(nil)
	require.NoError(t, b.order(t, b.connect(t), protocols[0], "k").commit)
}

func TestProxy_DownCutsAndRefuses(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	c := b.connect(t)
	b.proxy.Down()
	_, err := c.Exec(t.Context(), "SELECT 1").ReadAll()
	require.Error(t, err)
	_, err = b.dial(t.Context(), b.proxy.URL(b.pool.Config().ConnString()))
	require.Error(t, err)
	b.requireBackend(t, c, "")
	b.proxy.Up()
	require.NoError(t, b.order(t, b.connect(t), protocols[0], "k").commit)
}

func TestProxy_BlackholeDeliversWhenItEnds(t *testing.T) {
	t.Parallel()
	b := newBed(t, &Config{SwallowCancels: true}) // pgx sends one when it gives up
	c := b.connect(t)
	_, err := c.Exec(t.Context(), "BEGIN").ReadAll()
	require.NoError(t, err)
	b.proxy.Blackhole()
	ctx, giveUp := context.WithCancel(t.Context())
	written := c.recorder.writes()
	sent := make(chan answers, 1)
	go func() { sent <- protocols[2].send(ctx, c, "k") }()
	require.Eventually(t, func() bool { return c.recorder.writes() > written }, 10*time.Second, time.Millisecond)
	giveUp()
	require.ErrorIs(t, (<-sent).commit, context.Canceled)
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = b.dial(short, b.proxy.URL(b.pool.Config().ConnString()))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Zero(t, b.orders(t, "k"))

	b.proxy.Up()
	require.Eventually(t, func() bool { return b.orders(t, "k") == 1 }, 10*time.Second, 5*time.Millisecond)
	require.NoError(t, b.order(t, b.connect(t), protocols[0], "next").commit)
}

func TestProxy_CancelRequests(t *testing.T) {
	t.Parallel()
	for _, swallow := range []bool{false, true} {
		b := newBed(t, &Config{SwallowCancels: swallow})
		c := b.connect(t)
		holder, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = holder.Exec(t.Context(), "LOCK TABLE orders")
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() {
			_, err := c.Exec(t.Context(), "SELECT count(*) FROM orders").ReadAll()
			ended <- err
		}()
		b.requireBackend(t, c, "active") // and it stays so until the lock is gone
		require.NoError(t, c.CancelRequest(t.Context()))
		if !swallow {
			require.ErrorContains(t, <-ended, "57014")
		}
		require.NoError(t, holder.Rollback(t.Context()))
		if swallow {
			require.NoError(t, <-ended)
		}
		require.Equal(t, Stats{Connections: 1, Cancels: 1}, b.proxy.Stats())
	}
}

func TestProxy_CloseEndsWhatRuns(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	idle, held := b.connect(t), b.connect(t)
	b.proxy.Next(Rule{Do: HoldBytes})
	require.Error(t, b.order(t, held, protocols[0], "k").commit)
	b.proxy.Blackhole()
	require.NoError(t, b.proxy.Close())
	require.NoError(t, b.proxy.Close())
	_, err := idle.Exec(t.Context(), "SELECT 1").ReadAll()
	require.Error(t, err)
	b.requireBackend(t, held, "")
	require.Zero(t, b.orders(t, "k"))
	b.proxy.Up() // does nothing
	_, err = b.dial(t.Context(), b.proxy.URL(b.pool.Config().ConnString()))
	require.Error(t, err)
	require.False(t, errors.Is(err, context.DeadlineExceeded))
}
