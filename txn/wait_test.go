package txn_test

import (
	"context"
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

// held starts an order that holds its key until release is called.
func (s *shop) held(t *testing.T, req idempotency.Request) (release func() (txn.Result[order], error)) {
	t.Helper()
	entered, goOn, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	enter := sync.OnceFunc(func() { close(entered) }) // a serialization failure enters it again
	var res txn.Result[order]
	var err error
	go func() {
		defer close(done)
		res, err = txn.WithIdempotency(context.WithoutCancel(t.Context()), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			enter()
			<-goOn
			return insertOrder(ctx, tx, req.Key.Value())
		})
	}()
	<-entered
	var once sync.Once
	release = func() (txn.Result[order], error) {
		once.Do(func() { close(goOn) })
		<-done
		return res, err
	}
	t.Cleanup(func() { _, _ = release() })
	return release
}

// rival is a replica whose operation is declared otherwise.
func (s *shop) rival(t *testing.T, op idempotency.Operation) *shop {
	t.Helper()
	return s.replica(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{op} })
}

func TestWait_HundredDuplicatesOnAPoolOfTen(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 10 })
	other := s.rival(t, create)
	req := request(t, "k", "body")
	release := s.held(t, req)
	results := make(chan error, 100)
	var fresh atomic.Int64
	for i := range 100 {
		from := s // half of them merge with the leader in the process, the others poll from another one
		if i%2 == 1 {
			from = other
		}
		go func() {
			res, err := from.place(t.Context(), req)
			if err == nil && !res.Replayed {
				fresh.Add(1)
			}
			results <- err
		}()
	}
	// Other orders go on meanwhile: the waiters hold no connection.
	for i := range 20 {
		_, err := s.place(t.Context(), request(t, "other"+string(rune('a'+i)), "body"))
		require.NoError(t, err)
	}
	first, err := release()
	require.NoError(t, err)
	if !first.Replayed {
		fresh.Add(1)
	}
	for range 100 {
		require.NoError(t, <-results)
	}
	require.EqualValues(t, 1, fresh.Load(), "under SERIALIZABLE it may be another than the first")
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestWait_IsBounded(t *testing.T) {
	t.Parallel()
	op := create
	op.Wait = 300 * time.Millisecond
	s := newShop(t)
	other := s.rival(t, op)
	req := request(t, "k", "body")
	s.held(t, req)
	for range 3 { // the first polls, the others follow it
		go func() { _, _ = other.place(t.Context(), req) }()
	}
	begin := time.Now()
	_, err := other.place(t.Context(), req)
	var inProgress *idempotency.InProgressError
	require.ErrorAs(t, err, &inProgress)
	require.GreaterOrEqual(t, inProgress.RetryAfter, time.Second)
	require.GreaterOrEqual(t, time.Since(begin), op.Wait)
}

func TestWait_NoWaitAnswersAtOnce(t *testing.T) {
	t.Parallel()
	op := create
	op.Wait = idempotency.NoWait
	s := newShop(t)
	other := s.rival(t, op)
	req := request(t, "k", "body")
	release := s.held(t, req)
	_, err := other.place(t.Context(), req)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	_, err = release()
	require.NoError(t, err)
	res, err := other.place(t.Context(), req)
	require.NoError(t, err)
	require.True(t, res.Replayed)
}

func TestWait_MaxWaitersIsBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *txn.Config) { c.MaxWaiters = -1 })
	req := request(t, "k", "body")
	s.held(t, req)
	_, err := s.place(t.Context(), req)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
}

func TestWait_CancelledWaiterHarmsNobody(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k", "body")
	release := s.held(t, req)
	ctx, cancel := context.WithCancel(t.Context())
	cancelled, patient := make(chan error, 1), make(chan error, 1)
	go func() { _, err := s.place(ctx, req); cancelled <- err }()
	go func() { _, err := s.place(t.Context(), req); patient <- err }()
	cancel()
	err := <-cancelled
	require.ErrorIs(t, err, context.Canceled)
	_, err = release()
	require.NoError(t, err)
	require.NoError(t, <-patient)
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestWait_LeaderThatFailsLeavesTheKeyToItsFollowers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k", "body")
	entered, goOn := make(chan struct{}), make(chan struct{})
	leader := make(chan error, 1)
	go func() {
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(context.Context, pgx.Tx) (order, error) {
			close(entered)
			<-goOn
			return order{}, context.DeadlineExceeded
		})
		leader <- err
	}()
	<-entered
	followers := make(chan error, 10)
	for range cap(followers) {
		go func() { _, err := s.place(t.Context(), req); followers <- err }()
	}
	close(goOn)
	require.Error(t, <-leader)
	for range cap(followers) {
		require.NoError(t, <-followers)
	}
	require.Equal(t, 1, s.orders(t, "k"))
}

// Whoever waits for a call hears of its outcome when COMMIT has answered, and not before: it may say no.
func TestWait_LeaderWhoseCommitIsRefusedSharesNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `ALTER TABLE orders ADD CONSTRAINT one_note UNIQUE (note) DEFERRABLE INITIALLY DEFERRED`)
	s.exec(t, `INSERT INTO orders (key, note) VALUES ('old', 'same')`)
	req := request(t, "k", "body")
	entered, goOn := make(chan struct{}), make(chan struct{})
	leader := make(chan error, 1)
	go func() {
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			close(entered)
			<-goOn
			_, err := tx.Exec(ctx, `INSERT INTO orders (key, note) VALUES ('k', 'same')`)
			return order{Key: "never"}, err
		})
		leader <- err
	}()
	<-entered
	follows := make(chan struct{})
	follower := make(chan answer, 1)
	go func() {
		res, err := s.place(noticed{t.Context(), sync.OnceFunc(func() { close(follows) })}, req)
		follower <- answer{res, err}
	}()
	<-follows
	close(goOn)
	require.ErrorContains(t, <-leader, "one_note")
	a := <-follower
	require.NoError(t, a.err)
	require.False(t, a.Replayed, "there was nothing to share: it placed the order itself")
	require.Equal(t, "k", a.Value.Key)
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestWait_FollowerWithAnotherPayloadIsMismatch(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	release := s.held(t, request(t, "k", "one"))
	_, err := s.place(t.Context(), request(t, "k", "two"))
	require.ErrorIs(t, err, idempotency.ErrMismatch, "at once: the running payload is known")
	require.NotContains(t, err.Error(), "0001", "there is no time yet")
	_, err = release()
	require.NoError(t, err)
	_, err = s.place(t.Context(), request(t, "k", "two"))
	require.ErrorIs(t, err, idempotency.ErrMismatch)
}

func TestNested_CallOfTheSameRunnerIsRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "outer", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		got, ok := txn.FromContext(ctx)
		require.True(t, ok)
		require.Equal(t, tx, got)
		res, err := s.place(ctx, request(t, "inner", "body"))
		return res.Value, err
	})
	require.ErrorIs(t, err, idempotency.ErrNested)
	require.Zero(t, s.orders(t, "inner"))
}
