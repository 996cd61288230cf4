package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// orders is a service's table with the machine's states.
type orders struct {
	*pgxpool.Pool
	guard *Guard
}

func newOrders(t *testing.T, configure ...func(*pgxpool.Config)) orders {
	t.Helper()
	o := orders{Pool: pgtest.Pool(t, configure...), guard: newGuard(t, orderMachine(t))}
	o.exec(t, `CREATE TABLE orders (id bigint PRIMARY KEY, status text)`)
	return o
}

func newGuard(t *testing.T, m *Machine) *Guard {
	t.Helper()
	g, err := m.Guard(Column{Table: pgx.Identifier{"orders"}, Key: []string{"id"}, State: "status"})
	require.NoError(t, err)
	return g
}

func (o orders) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := o.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func (o orders) insert(t *testing.T, id int, state string) {
	t.Helper()
	o.exec(t, `INSERT INTO orders VALUES ($1, $2)`, id, state)
}

func (o orders) state(t *testing.T, id int) (state string) {
	t.Helper()
	require.NoError(t, o.QueryRow(t.Context(), `SELECT coalesce(status::text, '<null>') FROM orders WHERE id = $1`, id).Scan(&state))
	return state
}

// move moves an order in a transaction of its own.
func (o orders) move(ctx context.Context, id int, to string) (moved Moved, err error) {
	err = pgx.BeginFunc(ctx, o, func(tx pgx.Tx) error {
		moved, err = o.guard.Move(ctx, tx, to, id)
		return err
	})
	return moved, err
}

func (o orders) begin(t *testing.T) pgx.Tx {
	t.Helper()
	tx, err := o.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func TestGuard_FourAnswersInEveryQueryModeAndType(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			o := orders{Pool: pool, guard: newGuard(t, orderMachine(t))}
			o.exec(t, `CREATE DOMAIN status_domain AS text CHECK (value <> '')`)
			o.exec(t, `CREATE TYPE status_enum AS ENUM ('created', 'paid', 'shipped', 'delivered', 'refunded')`)
			for i, kind := range []string{"text", "varchar(20)", "status_domain", "status_enum"} {
				schema := fmt.Sprint("s", i)
				o.exec(t, fmt.Sprintf(`CREATE SCHEMA %s`, schema))
				o.exec(t, fmt.Sprintf(`CREATE TABLE %s.orders (id bigint PRIMARY KEY, status %s)`, schema, kind))
				o.exec(t, fmt.Sprintf(`INSERT INTO %s.orders VALUES (1, 'created'), (2, 'created')`, schema))
				var err error
				o.guard, err = orderMachine(t).Guard(Column{Table: pgx.Identifier{schema, "orders"}, Key: []string{"id"}, State: "status"})
				require.NoError(t, err)
				o.fourAnswers(t)
				var states string
				require.NoError(t, o.QueryRow(t.Context(),
					fmt.Sprintf(`SELECT string_agg(status::text, ' ' ORDER BY id) FROM %s.orders`, schema)).Scan(&states))
				require.Equal(t, "paid created", states, "the other row is as it was")
			}
		})
	}
}

// fourAnswers gets them for a new order 1.
func (o orders) fourAnswers(t *testing.T) {
	t.Helper()
	tx := o.begin(t)
	moved, err := o.guard.Move(t.Context(), tx, "paid", 1)
	require.NoError(t, err)
	require.Equal(t, Moved{From: "created", To: "paid"}, moved)
	moved, err = o.guard.Move(t.Context(), tx, "paid", 1)
	require.NoError(t, err)
	require.Equal(t, Moved{From: "paid", To: "paid", Already: true}, moved)
	_, err = o.guard.Move(t.Context(), tx, "delivered", 1)
	var refused *TransitionError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, TransitionError{Machine: "order", From: "paid", To: "delivered", Allowed: []string{"shipped", "refunded"}}, *refused)
	_, err = o.guard.Move(t.Context(), tx, "created", 1)
	require.ErrorIs(t, err, ErrTransition, "nothing leads to a start")
	_, err = o.guard.Move(t.Context(), tx, "paid", 99)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = o.guard.Move(t.Context(), tx, "piad", 1)
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, tx.Commit(t.Context()), "no answer has aborted the transaction")
}

func TestGuard_OfHundredCallersOneMoves(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			o := newOrders(t, func(c *pgxpool.Config) { c.MaxConns = 20 })
			o.insert(t, 1, "created")
			ctx := t.Context()
			answers := make([]string, 100)
			var group sync.WaitGroup
			for i := range answers {
				group.Go(func() {
					for answers[i] = "again"; answers[i] == "again"; {
						var moved Moved
						err := pgx.BeginTxFunc(ctx, o, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
							moved, err = o.guard.Move(ctx, tx, "paid", 1)
							return err
						})
						switch {
						case Restartable(err) && level != pgx.ReadCommitted:
						case err != nil:
							answers[i] = err.Error()
						case moved.Already:
							answers[i] = "already"
						default:
							answers[i] = "moved from " + moved.From
						}
					}
				})
			}
			group.Wait()
			count := map[string]int{}
			for _, answer := range answers {
				count[answer]++
			}
			require.Equal(t, map[string]int{"moved from created": 1, "already": 99}, count)
		})
	}
}

// Two ways lead on from paid: whoever comes second is refused, and told why.
func TestGuard_OneOfTwoWays(t *testing.T) {
	t.Parallel()
	o := newOrders(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	for id := range 25 {
		o.insert(t, id, "paid")
		ways := []string{"shipped", "refunded"}
		errs := make([]error, len(ways))
		var group sync.WaitGroup
		for i, to := range ways {
			group.Go(func() { _, errs[i] = o.move(t.Context(), id, to) })
		}
		group.Wait()
		won := 0
		if errs[0] != nil {
			won = 1
		}
		require.NoError(t, errs[won])
		require.Equal(t, ways[won], o.state(t, id))
		var refused *TransitionError
		require.ErrorAs(t, errs[1-won], &refused)
		require.Equal(t, ways[won], refused.From)
	}
}

// A caller who waits for another one is told what is true after that one's end.
func TestGuard_AnswersWithWhatTheOtherLeft(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]bool{"committed": true, "rolled back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOrders(t)
			o.insert(t, 1, "created")
			first := o.begin(t)
			_, err := o.guard.Move(t.Context(), first, "paid", 1)
			require.NoError(t, err)
			type answer struct {
				moved Moved
				err   error
			}
			second := make(chan answer, 1)
			go func() {
				moved, err := o.move(t.Context(), 1, "shipped")
				second <- answer{moved, err}
			}()
			o.awaitWaiter(t)
			if commit {
				require.NoError(t, first.Commit(t.Context()))
				got := <-second
				require.NoError(t, got.err)
				require.Equal(t, Moved{From: "paid", To: "shipped"}, got.moved)
				return
			}
			require.NoError(t, first.Rollback(t.Context()))
			var refused *TransitionError
			require.ErrorAs(t, (<-second).err, &refused)
			require.Equal(t, "created", refused.From)
			require.Equal(t, "created", o.state(t, 1))
		})
	}
}

// Under the stricter levels the transaction of a caller who had to wait is too old to be told what is true now.
func TestGuard_WaiterWithAnOldSnapshotRestarts(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		o := newOrders(t)
		o.insert(t, 1, "created")
		first := o.begin(t)
		_, err := o.guard.Move(t.Context(), first, "paid", 1)
		require.NoError(t, err)
		second := make(chan error, 1)
		go func() {
			second <- pgx.BeginTxFunc(t.Context(), o, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				_, err := o.guard.Move(t.Context(), tx, "shipped", 1)
				return err
			})
		}()
		o.awaitWaiter(t)
		require.NoError(t, first.Commit(t.Context()))
		require.ErrorIs(t, <-second, ErrRestart)
		require.Equal(t, "paid", o.state(t, 1))
	}
}

// awaitWaiter returns when a session of this database waits for a lock.
func (o orders) awaitWaiter(t *testing.T) {
	t.Helper()
	for waiting := false; !waiting; {
		require.NoError(t, o.QueryRow(t.Context(),
			`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waiting))
	}
}

func TestGuard_AnswerHoldsUntilTheEnd(t *testing.T) {
	t.Parallel()
	for to, want := range map[string]error{"paid": nil, "refunded": nil, "delivered": ErrTransition} {
		t.Run(to, func(t *testing.T) {
			t.Parallel()
			o := newOrders(t)
			o.insert(t, 1, "paid")
			tx := o.begin(t)
			_, err := o.guard.Move(t.Context(), tx, to, 1)
			require.ErrorIs(t, err, want)
			_, err = o.Exec(t.Context(), `BEGIN; SET LOCAL lock_timeout = '20ms'; UPDATE orders SET status = 'lost' WHERE id = 1; COMMIT`)
			var server *pgconn.PgError
			require.ErrorAs(t, err, &server)
			require.Equal(t, "55P03", server.Code, "nobody else changes the row meanwhile")
		})
	}
}

func TestGuard_CancelledCallMovesNothing(t *testing.T) {
	t.Parallel()
	o := newOrders(t)
	o.insert(t, 1, "created")
	holder := o.begin(t)
	_, err := holder.Exec(t.Context(), `SELECT FROM orders WHERE id = 1 FOR UPDATE`)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := o.move(ctx, 1, "paid")
		done <- err
	}()
	o.awaitWaiter(t)
	cancel()
	require.True(t, errors.Is(<-done, context.Canceled))
	require.NoError(t, holder.Rollback(t.Context()))
	require.Equal(t, "created", o.state(t, 1))
}
