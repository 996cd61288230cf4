package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Column says where a table of the service keeps a machine's states. Its names come from the program; they are quoted,
// so they are spelt as PostgreSQL stores them: lower case, unless the table was made otherwise.
type Column struct {
	// Table is its name, with its schema or without: {"shop", "orders"} or {"orders"}.
	Table pgx.Identifier
	// Key is the columns that tell rows apart, together unique: {"id"}, or {"tenant", "id"}.
	Key []string
	// State is the column with the state: text, varchar, a domain over them, or an ENUM.
	State string
}

// Guard moves rows of one table from state to state, as its machine allows. It is safe for concurrent use.
type Guard struct {
	machine *Machine
	keys    int
	lock    string
	move    string
}

// Guard returns a guard of a table's states. The error is a *ConfigError; the table is looked at by Move only.
func (m *Machine) Guard(c Column) (*Guard, error) {
	if err := m.checkColumn(c); err != nil {
		return nil, err
	}
	quote := func(name string) string { return pgx.Identifier{name}.Sanitize() }
	var where []string
	for i, column := range c.Key {
		where = append(where, fmt.Sprintf("%s = $%d", quote(column), i+1))
	}
	table, state, row, n := c.Table.Sanitize(), quote(c.State), strings.Join(where, " AND "), len(c.Key)
	return &Guard{
		machine: m, keys: n,
		// The lock makes the answer hold until the transaction ends, also when nothing is moved. It is the one that the UPDATE
		// takes: a weaker one would have to grow, and two callers who both wait for that would be a deadlock.
		lock: fmt.Sprintf("SELECT %s::text FROM %s WHERE %s FOR NO KEY UPDATE", state, table, row),
		// The guard: whatever was read before, only a row in one of these states is changed. As text, since pgx has no arrays of
		// a service's ENUM.
		move: fmt.Sprintf("UPDATE %s SET %s = $%d WHERE %s AND %s::text = ANY($%d::text[])", table, state, n+1, row, state, n+2),
	}, nil
}

func (m *Machine) checkColumn(c Column) error {
	field := "Machine " + m.name + ": Column."
	switch {
	case len(c.Table) < 1 || len(c.Table) > 2:
		return &ConfigError{Field: field + "Table", Rule: "must be the table's name, or its schema's and its own"}
	case len(c.Key) < 1 || len(c.Key) > 8:
		return &ConfigError{Field: field + "Key", Rule: "must name 1 to 8 columns"}
	case slices.Contains(c.Key, c.State):
		return &ConfigError{Field: field + "Key", Rule: "must not name the state's column"}
	}
	for i, column := range c.Key {
		if slices.Contains(c.Key[:i], column) {
			return &ConfigError{Field: field + "Key", Rule: fmt.Sprintf("must not name %q again", column)}
		}
	}
	// PostgreSQL would cut a longer name, and mean another column.
	const longest = 63
	for _, part := range []struct {
		field string
		names []string
	}{{"Table", c.Table}, {"Key", c.Key}, {"State", []string{c.State}}} {
		for _, name := range part.names {
			if rule := ruleOf(validateName("name", name, longest)); rule != "" {
				return &ConfigError{Field: field + part.field, Rule: rule}
			}
		}
	}
	return nil
}

// Move moves the row that has these values in Column.Key to a state, in the caller's transaction and in one round trip.
// Of concurrent callers exactly one moves it; the others wait for that one's end, and are told that the row is there
// Already. Whatever the answer, it holds until the transaction ends: nobody else can change the row before.
//
// It returns ErrTransition (*TransitionError) where no transition leads there from the row's state, ErrNotFound where
// there is no such row, ErrInvalid where there is no such state, and ErrRestart where the transaction must run again,
// which txn does by itself. After any error of PostgreSQL the transaction is aborted; after the first three it is not.
func (g *Guard) Move(ctx context.Context, tx pgx.Tx, to string, key ...any) (Moved, error) {
	if len(key) != g.keys {
		return Moved{}, &ConfigError{Field: "Guard.Move: key", Rule: fmt.Sprintf("must be %d values, one for each column of Column.Key, is %d", g.keys, len(key))}
	}
	if err := g.machine.check(to); err != nil {
		return Moved{}, err
	}
	states, changed, err := g.send(ctx, tx, to, key)
	if err != nil {
		return Moved{}, fmt.Errorf("idempotency: move %s to %s: %w", g.machine.name, to, restarting(err))
	}
	switch {
	case len(states) > 1 || changed > 1:
		return Moved{}, &ConfigError{Field: "Machine " + g.machine.name + ": Column.Key", Rule: "must be unique, finds several rows: roll back"}
	case len(states) == 0 && changed == 1:
		return Moved{}, fmt.Errorf("idempotency: move %s to %s: %w (the row came to be meanwhile)", g.machine.name, to, ErrRestart)
	case len(states) == 0:
		return Moved{}, fmt.Errorf("%w (%s)", ErrNotFound, g.machine.name)
	}
	var from string // also for NULL: a row that is in no state is moved nowhere
	if states[0] != nil {
		from = *states[0]
	}
	switch {
	case from == to:
		return Moved{From: to, To: to, Already: true}, nil
	case changed == 1:
		return Moved{From: from, To: to}, nil
	case g.machine.Allows(from, to):
		return Moved{}, fmt.Errorf("idempotency: move %s from %s to %s: PostgreSQL changed no row, although it was locked: a trigger, a rule or a row policy of the table prevents it", g.machine.name, from, to)
	}
	return Moved{}, g.machine.Refuse(from, to)
}

// send locks the row, then moves it. Two statements, since the second one's snapshot must be younger than the lock: an
// UPDATE that began before another caller's commit passes over a row that only now is in the right state.
func (g *Guard) send(ctx context.Context, tx pgx.Tx, to string, key []any) (states []*string, changed int64, err error) {
	batch := &pgx.Batch{}
	batch.Queue(g.lock, key...)
	batch.Queue(g.move, append(slices.Clone(key), to, g.machine.Previous(to))...)
	results := tx.SendBatch(ctx, batch)
	defer func() {
		if closed := results.Close(); err == nil {
			err = closed
		}
	}()
	rows, err := results.Query()
	if err != nil {
		return nil, 0, err
	}
	if states, err = pgx.CollectRows(rows, pgx.RowTo[*string]); err != nil {
		return nil, 0, err
	}
	tag, err := results.Exec()
	return states, tag.RowsAffected(), err
}

// restarting adds ErrRestart to the server's errors that it is for; the others are the service's own.
func restarting(err error) error {
	var server *pgconn.PgError
	if errors.As(err, &server) && restartable(server) {
		return fmt.Errorf("%w: %w", ErrRestart, err)
	}
	return err
}
