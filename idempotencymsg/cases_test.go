package idempotencymsg_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
)

func failing(err error) idempotencymsg.DeadLetter {
	return func(context.Context, pgx.Tx, idempotencymsg.Message, error) error { return err }
}

// The broker is told only what has committed.
func TestCase_M01_NoAckForACommitThatFails(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	_, err := p.direct.Exec(t.Context(), `CREATE TABLE parents (id text PRIMARY KEY);
		ALTER TABLE effects ADD FOREIGN KEY (id) REFERENCES parents DEFERRABLE INITIALLY DEFERRED;
		INSERT INTO parents VALUES ('a'), ('b')`)
	require.NoError(t, err)
	batch := []idempotencymsg.Message{message("a", ""), message("orphan", ""), message("b", "")}
	results := p.inbox.HandleBatch(t.Context(), batch)
	require.Equal(t, []idempotencymsg.Verdict{idempotencymsg.Handled, idempotencymsg.Retry, idempotencymsg.Handled}, verdicts(results))
	require.ErrorContains(t, results[1].Err, "foreign key")
	require.Empty(t, results[1].Reply)
	require.Equal(t, idempotencymsg.Retry, p.inbox.Handle(t.Context(), batch[1]).Verdict)
	require.Equal(t, 2, p.count(t, `SELECT count(*) FROM idempotency.records`))
	_, err = p.direct.Exec(t.Context(), `INSERT INTO parents VALUES ('orphan')`)
	require.NoError(t, err)
	require.Equal(t, idempotencymsg.Handled, p.inbox.Handle(t.Context(), batch[1]).Verdict)
	require.Equal(t, 3, p.count(t, `SELECT count(*) FROM effects`))
}

// A consumer that shuts down between the handler's end and the commit finishes, and the next delivery is a duplicate.
func TestCase_M02_AShutdownBehindTheHandlerDoesNotUndoIt(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	require.True(t, p.inbox.Handle(t.Context(), message("warm", "")).Ack())
	ctx, cancel := context.WithCancel(t.Context())
	res := p.inbox.HandleWith(ctx, message("m", ""), func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
		defer cancel()
		return write(ctx, tx, m)
	})
	require.Equal(t, idempotencymsg.Handled, res.Verdict)
	res = p.inbox.Handle(ctx, message("late", ""))
	require.Equal(t, idempotencymsg.Retry, res.Verdict)
	require.ErrorIs(t, res.Err, context.Canceled)
	require.Equal(t, idempotencymsg.Duplicate, p.inbox.Handle(t.Context(), message("m", "")).Verdict)
	require.Equal(t, 1, p.effects(t, "m"))
	require.Zero(t, p.effects(t, "late"))
}

// A reply over the limit is refused whole, or kept as "done, reply gone": never cut.
func TestCase_M03_AReplyOverTheLimit(t *testing.T) {
	t.Parallel()
	for _, tombstone := range []bool{false, true} {
		op := mail
		op.ResultLimit, op.Tombstone = 1000, tombstone
		p := newPost(t, idempotencymsg.Config{Operation: op})
		long := func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
			_, err := write(ctx, tx, m)
			return []byte(strings.Repeat("x", 2000)), err
		}
		res := p.inbox.HandleWith(t.Context(), message("m", ""), long)
		if !tombstone {
			require.Equal(t, idempotencymsg.Retry, res.Verdict)
			require.ErrorIs(t, res.Err, idempotency.ErrResultTooLarge)
			require.Zero(t, p.effects(t, "m"))
			continue
		}
		require.Equal(t, idempotencymsg.Handled, res.Verdict)
		require.Len(t, res.Reply, 2000)
		res = p.inbox.HandleWith(t.Context(), message("m", ""), long)
		require.Equal(t, idempotencymsg.Duplicate, res.Verdict)
		require.Empty(t, res.Reply)
		require.Equal(t, 1, p.effects(t, "m"))
	}
}

func TestCase_M08_RepliesOfAnyBytesComeBackEqual(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	for id, reply := range map[string][]byte{"none": nil, "zero": {0}, "binary": {0xff, 0xfe, 0, 1}, "text": []byte("null"), "json": []byte(`{"a":1}`)} {
		for _, want := range []idempotencymsg.Verdict{idempotencymsg.Handled, idempotencymsg.Duplicate} {
			res := p.inbox.HandleWith(t.Context(), message(id, ""), func(context.Context, pgx.Tx, idempotencymsg.Message) ([]byte, error) { return reply, nil })
			require.Equal(t, want, res.Verdict)
			require.Equal(t, reply, res.Reply, id)
		}
	}
}

// Whatever way a handler ends, its message is handled, recorded, or free for the next delivery at once.
func TestCase_M10_OddExitsLeaveNoMessageStuck(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	res := p.inbox.Handle(t.Context(), message("panic", "panic"))
	require.Equal(t, idempotencymsg.Retry, res.Verdict)
	var group sync.WaitGroup
	group.Go(func() {
		p.inbox.HandleWith(t.Context(), message("goexit", ""), func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
			_, _ = write(ctx, tx, m)
			runtime.Goexit()
			return nil, nil
		})
	})
	group.Wait()
	for _, id := range []string{"panic", "goexit"} {
		require.Zero(t, p.effects(t, id))
	}
	m := message("goexit", "")
	require.Equal(t, idempotencymsg.Handled, p.inbox.Handle(t.Context(), m).Verdict)
	require.Equal(t, 1, p.effects(t, "goexit"))

	results := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("a", ""), message("commit", "commit"), message("b", "")})
	require.Equal(t, idempotencymsg.Failed, results[1].Verdict)
	require.ErrorIs(t, results[1].Err, idempotency.ErrTransactionEnded)
	require.Equal(t, idempotencymsg.Handled, results[2].Verdict)
	for _, id := range []string{"a", "commit", "b"} {
		require.True(t, p.inbox.Handle(t.Context(), message(id, map[string]string{"commit": "commit"}[id])).Ack())
		require.LessOrEqual(t, p.effects(t, id), 1, id)
	}
}

// The handler is done and its mark cannot be written: all of it is rolled back, and the next delivery runs cleanly.
func TestCase_M11_AMarkThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	require.True(t, p.inbox.Handle(t.Context(), message("warm", "")).Ack())
	_, err := p.direct.Exec(t.Context(), `ALTER TABLE idempotency.records ADD CONSTRAINT broken CHECK (key NOT LIKE 'm%')`)
	require.NoError(t, err)
	results := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("a", ""), message("m1", ""), message("b", "")})
	require.Equal(t, []idempotencymsg.Verdict{idempotencymsg.Handled, idempotencymsg.Retry, idempotencymsg.Handled}, verdicts(results))
	require.Zero(t, p.effects(t, "m1"))
	_, err = p.direct.Exec(t.Context(), `ALTER TABLE idempotency.records DROP CONSTRAINT broken`)
	require.NoError(t, err)
	require.Equal(t, idempotencymsg.Handled, p.inbox.Handle(t.Context(), message("m1", "")).Verdict)
	require.Equal(t, 1, p.effects(t, "m1"))
}

// "Somebody is handling it" and "not with this payload" are two answers.
func TestCase_M13_InProgressIsRetriedAndAMismatchIsNot(t *testing.T) {
	t.Parallel()
	op := mail
	op.Wait = idempotency.NoWait
	p := newPost(t, idempotencymsg.Config{Operation: op})
	entered, leave := make(chan struct{}), make(chan struct{})
	enter := sync.OnceFunc(func() { close(entered) }) // it may run again
	var group sync.WaitGroup
	group.Go(func() {
		p.inbox.HandleWith(t.Context(), message("m", ""), func(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
			enter()
			<-leave
			return write(ctx, tx, m)
		})
	})
	<-entered
	results := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("m", ""), message("other", "")})
	require.Equal(t, []idempotencymsg.Verdict{idempotencymsg.Retry, idempotencymsg.Handled}, verdicts(results))
	require.ErrorIs(t, results[0].Err, idempotency.ErrInProgress)
	require.Positive(t, results[0].RetryAfter)
	close(leave)
	group.Wait()
	other := message("m", "")
	other.Payload = []byte("x")
	res := p.inbox.Handle(t.Context(), other)
	require.Equal(t, idempotencymsg.Poisoned, res.Verdict)
	require.Zero(t, res.RetryAfter)
	require.Equal(t, 1, p.effects(t, "m"))
}

func TestCase_M15_AReplayIsVisible(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	require.Equal(t, idempotencymsg.Handled, p.inbox.Handle(t.Context(), message("m", "")).Verdict)
	require.Equal(t, idempotencymsg.Duplicate, p.inbox.Handle(t.Context(), message("m", "")).Verdict)
}
