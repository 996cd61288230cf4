package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

func TestGuard_OddRows(t *testing.T) {
	t.Parallel()
	o := newOrders(t)
	from := func(id int, to string) string {
		t.Helper()
		before := o.state(t, id)
		_, err := o.move(t.Context(), id, to)
		var refused *TransitionError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, before, o.state(t, id))
		return refused.From
	}
	o.exec(t, `INSERT INTO orders VALUES (1, NULL), (2, ''), (3, 'Paid'), (4, ' paid'), (5, 'of a later release')`)
	require.Empty(t, from(1, "created"), "a row in no state is moved nowhere")
	require.Empty(t, from(2, "created"))
	require.Equal(t, "Paid", from(3, "shipped"))
	require.Equal(t, " paid", from(4, "shipped"))
	require.Equal(t, "of a later release", from(5, "paid"))

	_, err := o.move(t.Context(), 6, "paid")
	require.ErrorIs(t, err, ErrNotFound)
	for _, key := range [][]any{nil, {1, 2}} {
		_, err = o.guard.Move(t.Context(), o.begin(t), "paid", key...)
		require.ErrorIs(t, err, ErrConfig)
	}
	_, err = o.guard.Move(t.Context(), o.begin(t), "paid", nil)
	require.ErrorIs(t, err, ErrNotFound, "NULL is no row's key")
}

func TestGuard_OddTables(t *testing.T) {
	t.Parallel()
	t.Run("a trigger that swallows the change is no refusal", func(t *testing.T) {
		t.Parallel()
		o := newOrders(t)
		o.insert(t, 1, "created")
		o.exec(t, `CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`)
		o.exec(t, `CREATE TRIGGER swallow BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION swallow()`)
		_, err := o.move(t.Context(), 1, "paid")
		require.ErrorContains(t, err, "a trigger")
		require.NotErrorIs(t, err, ErrTransition)
	})
	t.Run("a key that is not unique", func(t *testing.T) {
		t.Parallel()
		o := newOrders(t)
		o.exec(t, `ALTER TABLE orders DROP CONSTRAINT orders_pkey`)
		o.insert(t, 1, "created")
		o.insert(t, 1, "created")
		_, err := o.move(t.Context(), 1, "paid")
		require.ErrorIs(t, err, ErrConfig)
		require.Equal(t, "created", o.state(t, 1))
	})
	t.Run("no table", func(t *testing.T) {
		t.Parallel()
		o := newOrders(t)
		o.exec(t, `DROP TABLE orders`)
		_, err := o.move(t.Context(), 1, "paid")
		var server *pgconn.PgError
		require.ErrorAs(t, err, &server)
		require.Equal(t, "42P01", server.Code)
		require.NotErrorIs(t, err, ErrSchema, "it is not our schema that is missing")
	})
	t.Run("a constraint of the service", func(t *testing.T) {
		t.Parallel()
		o := newOrders(t)
		o.exec(t, `ALTER TABLE orders ADD CONSTRAINT nobody_pays CHECK (status <> 'paid')`)
		o.insert(t, 1, "created")
		_, err := o.move(t.Context(), 1, "paid")
		var server *pgconn.PgError
		require.ErrorAs(t, err, &server)
		require.Equal(t, "nobody_pays", server.ConstraintName)
	})
}

// Names are quoted and states are parameters, whatever is in them.
func TestGuard_HostileNamesAndStates(t *testing.T) {
	t.Parallel()
	states := []string{`'; DROP TABLE "x`, `{a,b}`, `NULL`, `"quoted"`, `back\slash`, `$1`, ` spaces `, `%s`, `ü💶`, `null`, `a,b`, `--`}
	m, err := NewMachine("hostile", states[:1], states)
	require.NoError(t, err)
	pool := pgtest.Pool(t)
	column := Column{
		Table: pgx.Identifier{`sch"ema.x`, `Order; --`}, Key: []string{`ten"ant`, "Key of\u00a0it"}, State: `sta'te $1`,
	}
	quote := func(name string) string { return pgx.Identifier{name}.Sanitize() }
	_, err = pool.Exec(t.Context(), fmt.Sprintf(`CREATE SCHEMA %s; CREATE TABLE %s (%s text, %s uuid, %s text, PRIMARY KEY (%[3]s, %[4]s))`,
		quote(column.Table[0]), column.Table.Sanitize(), quote(column.Key[0]), quote(column.Key[1]), quote(column.State)))
	require.NoError(t, err)
	const id = "00000000-0000-0000-0000-000000000001"
	for _, tenant := range []string{"one", "two"} {
		_, err = pool.Exec(t.Context(), `INSERT INTO `+column.Table.Sanitize()+` VALUES ($1, $2, $3)`, tenant, id, states[0])
		require.NoError(t, err)
	}
	guard, err := m.Guard(column)
	require.NoError(t, err)
	for i, to := range states[1:] {
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			moved, err := guard.Move(t.Context(), tx, to, "one", id)
			require.Equal(t, Moved{From: states[i], To: to}, moved)
			return err
		})
		require.NoError(t, err)
	}
	var other string
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT `+quote(column.State)+` FROM `+column.Table.Sanitize()+` WHERE `+quote(column.Key[0])+` = 'two'`).Scan(&other))
	require.Equal(t, states[0], other)
}

func TestGuard_RefusesAWrongColumn(t *testing.T) {
	t.Parallel()
	good := Column{Table: pgx.Identifier{"orders"}, Key: []string{"id"}, State: "status"}
	for name, test := range map[string]struct {
		change      func(*Column)
		field, rule string
	}{
		"no table":    {func(c *Column) { c.Table = nil }, "Table", "the table's name"},
		"three parts": {func(c *Column) { c.Table = pgx.Identifier{"a", "b", "c"} }, "Table", "the table's name"},
		"empty table": {func(c *Column) { c.Table = pgx.Identifier{""} }, "Table", "must not be empty"},
		"NUL":         {func(c *Column) { c.Table = pgx.Identifier{"a\x00"} }, "Table", "control characters"},
		"long":        {func(c *Column) { c.State = strings.Repeat("s", 64) }, "State", "at most 63 bytes"},
		"no state":    {func(c *Column) { c.State = "" }, "State", "must not be empty"},
		"no key":      {func(c *Column) { c.Key = nil }, "Key", "1 to 8 columns"},
		"empty key":   {func(c *Column) { c.Key = []string{""} }, "Key", "must not be empty"},
		"key twice":   {func(c *Column) { c.Key = []string{"id", "id"} }, "Key", `"id" again`},
		"key = state": {func(c *Column) { c.Key = []string{"id", "status"} }, "Key", "must not name the state's column"},
	} {
		c := good
		test.change(&c)
		_, err := orderMachine(t).Guard(c)
		var config *ConfigError
		require.ErrorAs(t, err, &config, name)
		require.Equal(t, "Machine order: Column."+test.field, config.Field, name)
		require.Contains(t, config.Rule, test.rule, name)
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
