package idempotency

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

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
