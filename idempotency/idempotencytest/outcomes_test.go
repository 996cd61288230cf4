package idempotencytest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create", Wait: idempotency.NoWait}

type service struct {
	pool   *pgxpool.Pool
	runner *txn.Runner
	plug   *idempotencytest.Plug
}

func newService(t *testing.T) *service {
	t.Helper()
	s := &service{}
	s.pool = pgtest.Pool(t, txn.ConfigurePool, func(c *pgxpool.Config) { s.plug = idempotencytest.NewPlug(c) })
	var err error
	s.runner, err = txn.New(s.pool, &txn.Config{Operations: []idempotency.Operation{create}, CommitTimeout: time.Second, MaxRetries: -1})
	require.NoError(t, err)
	return s
}

func (s *service) place(ctx context.Context, req idempotency.Request) (txn.Result[string], error) {
	return txn.WithIdempotency(ctx, s.runner, req, func(context.Context, pgx.Tx) (string, error) { return "placed", nil })
}

func request(t *testing.T, value string) idempotency.Request {
	t.Helper()
	key, err := create.Key(idempotency.SingleTenant, value)
	require.NoError(t, err)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("payload"))}
}

func TestOutcomes_AreWhatTheProgramMeets(t *testing.T) {
	t.Parallel()
	s := newService(t)

	idempotencytest.Succeeded(t, s.runner, request(t, "replay"), "before")
	res, err := s.place(t.Context(), request(t, "replay"))
	require.NoError(t, err)
	require.True(t, res.Replayed)
	require.Equal(t, "before", res.Value)

	idempotencytest.Failed(t, s.runner, request(t, "failed"), "out_of_stock", "no more", "sold out")
	_, err = s.place(t.Context(), request(t, "failed"))
	var failed *idempotency.FailedError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "out_of_stock", failed.Code)

	idempotencytest.Mismatched(t, s.runner, request(t, "mismatch"))
	_, err = s.place(t.Context(), request(t, "mismatch"))
	require.ErrorIs(t, err, idempotency.ErrMismatch)

	release := idempotencytest.InProgress(t, s.pool, request(t, "busy").Key)
	_, err = s.place(t.Context(), request(t, "busy"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	release()
	require.Eventually(t, func() bool {
		_, err := s.place(t.Context(), request(t, "busy"))
		return err == nil
	}, 5*time.Second, 10*time.Millisecond)
}

func TestPlug_TheOutcomeStaysUnknownUntilItIsBack(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.plug.OutAtCommit() // also on a connection where nothing is prepared yet
	_, err := s.place(t.Context(), request(t, "unknown"))
	require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown)
	s.plug.In()
	res, err := s.place(t.Context(), request(t, "unknown"))
	require.NoError(t, err)
	require.True(t, res.Replayed, "it had committed")
}

func TestRequireExecutedOnce(t *testing.T) {
	t.Parallel()
	s := newService(t)
	req := request(t, "once")
	idempotencytest.RequireExecutedOnce(t, func(ctx context.Context) error {
		_, err := s.place(ctx, req)
		return err
	}, func(ctx context.Context) (n int) {
		require.NoError(t, s.pool.QueryRow(ctx, `SELECT count(*) FROM idempotency.records WHERE key = 'once'`).Scan(&n))
		return n
	})
}

func TestRolledBack_NothingStays(t *testing.T) { //nolint:tparallel // see inside
	t.Parallel()
	s := newService(t)
	t.Run("inside", func(t *testing.T) { //nolint:paralleltest // it has to end first
		runner, tx := idempotencytest.RolledBack(t, s.pool, s.runner)
		_, err := tx.Exec(t.Context(), `CREATE TABLE orders (id int)`)
		require.NoError(t, err)
		place := func(value string, fail error) (txn.Result[string], error) {
			return txn.WithIdempotency(t.Context(), runner, request(t, value), func(ctx context.Context, tx pgx.Tx) (string, error) {
				_, err := tx.Exec(ctx, `INSERT INTO orders VALUES (1)`)
				return "placed", errors.Join(err, fail)
			})
		}
		count := func() (n int) {
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM orders`).Scan(&n))
			return n
		}
		for i := range 3 {
			res, err := place("k", nil)
			require.NoError(t, err)
			require.Equal(t, i > 0, res.Replayed)
			require.Equal(t, 1, count())
		}
		broken := errors.New("broken")
		_, err = place("fails", broken)
		require.ErrorIs(t, err, broken)
		require.Equal(t, 1, count(), "the transaction goes on without it")
		for range 2 {
			_, err = place("refused", txn.Final("no", broken))
			require.ErrorIs(t, err, idempotency.ErrFailed)
		}
		_, err = txn.WithIdempotency(t.Context(), runner, request(t, "outer"), func(ctx context.Context, _ pgx.Tx) (string, error) {
			_, err := txn.WithIdempotency(ctx, runner, request(t, "inner"), func(context.Context, pgx.Tx) (string, error) { return "", nil })
			return "", err
		})
		require.ErrorIs(t, err, idempotency.ErrNested)
		var group sync.WaitGroup
		for range 10 {
			group.Go(func() {
				if _, err := place("at once", nil); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		require.Equal(t, 2, count())
	})
	var n int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.records`).Scan(&n))
	require.Zero(t, n)
}
