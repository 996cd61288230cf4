package txn_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// A function that ends its transaction by SQL of its own has maybe committed: it never runs again, and says so.
func TestCase_P05_TransactionEndedByTheFunctionNeverRunsAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t, impatient)
	t.Cleanup(func() { s.requireIdle(t) })
	boom := errors.New("boom")
	for _, c := range []struct {
		name   string
		sql    []string
		fails  error
		orders int // what the function committed by itself stays
	}{
		{name: "COMMIT", sql: []string{"COMMIT"}, orders: 1},
		{name: "COMMIT, then error", sql: []string{"COMMIT"}, fails: boom, orders: 1},
		{name: "COMMIT, then Final", sql: []string{"COMMIT"}, fails: txn.Final("no", boom), orders: 1},
		{name: "ROLLBACK", sql: []string{"ROLLBACK"}},
		{name: "COMMIT and BEGIN", sql: []string{"COMMIT", "BEGIN"}, orders: 1},
		{name: "COMMIT and BEGIN in one message", sql: []string{"COMMIT; BEGIN"}, orders: 1},
		{name: "COMMIT AND CHAIN", sql: []string{"COMMIT AND CHAIN"}, orders: 1},
		{name: "ROLLBACK AND CHAIN", sql: []string{"ROLLBACK AND CHAIN"}},
		{name: "COMMIT and BEGIN, then error", sql: []string{"COMMIT", "BEGIN"}, fails: boom, orders: 1},
		{name: "COMMIT and BEGIN, then aborted", sql: []string{"COMMIT", "BEGIN", "SELECT 1/0"}, orders: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			req, runs := request(t, c.name, "body"), 0
			for i := range 3 {
				req.Retry = i == 2
				res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
					runs++
					o, err := insertOrder(ctx, tx, c.name)
					require.NoError(t, err)
					for _, sql := range c.sql {
						_, _ = tx.Exec(ctx, sql)
					}
					return o, c.fails
				})
				require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
				var failed *idempotency.FailedError
				require.ErrorAs(t, err, &failed)
				require.Equal(t, txn.CodeTransactionEnded, failed.Code)
				require.Equal(t, i > 0, res.Replayed)
				require.Equal(t, 1, runs)
			}
			r, found := s.record(t, req)
			require.True(t, found)
			require.Equal(t, idempotency.StateFailed, r.State)
			require.False(t, r.Retryable)
			require.Equal(t, txn.CodeTransactionEnded, r.ErrorCode)
			require.Equal(t, c.orders, s.orders(t, c.name))
		})
	}
}

// leaveOpen starts a query and forgets it.
func leaveOpen(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`) //nolint:sqlclosecheck,gocritic // the very mistake
	return err
}

func TestCase_P05_OpenResultsAreAClearErrorAndLeaveNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	t.Cleanup(func() { s.requireIdle(t) })
	boom := errors.New("boom")
	for name, leave := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"rows": leaveOpen,
		"rows half read": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`)
			rows.Next()
			return err
		},
		"batch": func(ctx context.Context, tx pgx.Tx) error {
			tx.SendBatch(ctx, twoStatements())
			return nil
		},
		"rows, and an error": func(ctx context.Context, tx pgx.Tx) error { return errors.Join(leaveOpen(ctx, tx), boom) },
		"rows, and a Final": func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(leaveOpen(ctx, tx), txn.Final("no", boom))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req := request(t, name, "body")
			_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				o, err := insertOrder(ctx, tx, name)
				return o, errors.Join(err, leave(ctx, tx))
			})
			require.ErrorContains(t, err, "close them")
			require.NotErrorIs(t, err, idempotency.ErrFailed)
			_, found := s.record(t, req)
			require.False(t, found)
			require.Zero(t, s.orders(t, name))
			res, err := s.place(t.Context(), req)
			require.NoError(t, err)
			require.False(t, res.Replayed)
		})
	}
}

// atCommit makes every order note down, at the very COMMIT, how durable that is.
func (s *shop) atCommit(t testing.TB) {
	t.Helper()
	s.exec(t, `CREATE TABLE commits (synchronous_commit text)`)
	s.exec(t, `CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN INSERT INTO commits VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$`)
	s.exec(t, `CREATE CONSTRAINT TRIGGER note_commit AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION note_commit()`)
}

func TestCase_D8_FunctionCannotMakeItsCommitLessDurable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ server, function, want string }{
		{"on", "", "on"},
		{"on", "SET LOCAL synchronous_commit = off", "on"},
		{"on", "SET synchronous_commit = off", "on"},
		{"on", "SET LOCAL synchronous_commit = local", "on"},
		{"off", "", "on"},
		{"local", "SET LOCAL synchronous_commit = remote_write", "on"},
		{"remote_apply", "", "remote_apply"},
		{"on", "SET LOCAL synchronous_commit = remote_apply", "remote_apply"},
	} {
		t.Run(c.server+"/"+c.function, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, func(cfg *pgxpool.Config) {
				cfg.MaxConns = 1
				cfg.ConnConfig.RuntimeParams["synchronous_commit"] = c.server
			})
			s.atCommit(t)
			// The third completes over an expired record, which is another statement.
			for i, key := range []string{"first", "after a SET of the session", "first"} {
				if i == 2 {
					s.expire(t, request(t, key, "body"), "0")
				}
				_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
					if _, err := tx.Exec(ctx, c.function); err != nil {
						return order{}, err
					}
					return insertOrder(ctx, tx, key)
				})
				require.NoError(t, err)
			}
			rows, err := s.direct.Query(t.Context(), `SELECT synchronous_commit FROM commits`)
			require.NoError(t, err)
			seen, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Equal(t, []string{c.want, c.want, c.want}, seen)
		})
	}
}
