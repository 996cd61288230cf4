package txn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgonce/pgonce/idempotency"
)

// ErrRunnerOwnsTransaction is what Commit and Rollback of the transaction handed to a function return. The runner commits
// when the function returns nil, and rolls back when it returns an error.
var ErrRunnerOwnsTransaction = errors.New("txn: the runner commits or rolls back, return nil or an error instead")

// handedTx is the transaction a function gets: pgx.Tx in everything but its end. The same type is a savepoint, when
// savepoint is not empty; that one is ended by whoever began it.
type handedTx struct {
	conn *pgx.Conn
	*txState
	savepoint string
	closed    bool // this savepoint; guarded by mu
}

// txState is shared by a transaction and its savepoints.
type txState struct {
	// mu serialises the methods and the end: a goroutine that outlives the function would otherwise be in the middle of a
	// statement on a connection that the runner goes on to use. Rows are beyond its reach.
	mu         sync.Mutex
	ended      atomic.Bool // set under mu; a Tracer asks without it, from inside a statement
	used       bool
	savepoints int
	atEnd      []func()
}

var _ pgx.Tx = (*handedTx)(nil)

func newHandedTx(conn *pgx.Conn) *handedTx {
	return &handedTx{conn: conn, txState: &txState{}}
}

// end takes the transaction away from the function, when the statement that is running has ended.
func (t *handedTx) end() {
	t.mu.Lock()
	t.ended.Store(true)
	first := t.atEnd
	t.atEnd = nil
	t.mu.Unlock()
	for _, do := range first {
		do()
	}
}

// AtEnd has do called when the function returns, before anything else is done with the connection. false: it has returned.
// It is how txnsql takes away the sql.Tx that it has put around this one.
func (t *handedTx) AtEnd(do func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended.Load() {
		return false
	}
	t.atEnd = append(t.atEnd, do)
	return true
}

// over reports whether the function that got the transaction has returned.
func (t *handedTx) over() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended.Load()
}

// use locks the transaction for one statement. The caller unlocks mu if there is no error.
func (t *handedTx) use() error {
	t.mu.Lock()
	if t.ended.Load() || t.closed {
		t.mu.Unlock()
		return pgx.ErrTxClosed
	}
	t.used = true
	return nil
}

// Begin makes a savepoint. Its Commit and Rollback work, so that pgx.BeginFunc does.
func (t *handedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.use(); err != nil {
		return nil, err
	}
	defer t.mu.Unlock()
	t.savepoints++
	name := fmt.Sprintf("pgonce_%d", t.savepoints)
	if _, err := t.conn.Exec(ctx, "SAVEPOINT "+name); err != nil {
		return nil, err
	}
	return &handedTx{conn: t.conn, txState: t.txState, savepoint: name}, nil
}

// Commit releases a savepoint; on the transaction itself it returns ErrRunnerOwnsTransaction.
func (t *handedTx) Commit(ctx context.Context) error {
	return t.finish(ctx, "RELEASE SAVEPOINT "+t.savepoint)
}

// Rollback undoes a savepoint; on the transaction itself it returns ErrRunnerOwnsTransaction.
func (t *handedTx) Rollback(ctx context.Context) error {
	return t.finish(ctx, "ROLLBACK TO SAVEPOINT "+t.savepoint)
}

func (t *handedTx) finish(ctx context.Context, sql string) error {
	if err := t.use(); err != nil {
		return err
	}
	defer t.mu.Unlock()
	if t.savepoint == "" {
		return ErrRunnerOwnsTransaction
	}
	t.closed = true
	_, err := t.conn.Exec(ctx, sql)
	return err
}

// CopyFrom is pgx.Tx's.
func (t *handedTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := t.use(); err != nil {
		return 0, err
	}
	defer t.mu.Unlock()
	return t.conn.CopyFrom(ctx, table, columns, rows)
}

// SendBatch is pgx.Tx's.
func (t *handedTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.use(); err != nil {
		return closedResults{err}
	}
	defer t.mu.Unlock()
	return t.conn.SendBatch(ctx, b)
}

// LargeObjects is pgx.Tx's. It costs one round trip here: pgx makes them only in transactions it began itself, so this
// has it begin one with an empty statement on the connection that is in our transaction already.
func (t *handedTx) LargeObjects() pgx.LargeObjects {
	if err := t.use(); err != nil {
		panic(fmt.Errorf("txn: large objects: %w", err)) // the method has no error to return
	}
	defer t.mu.Unlock()
	tx, err := t.conn.BeginTx(context.Background(), pgx.TxOptions{BeginQuery: "-- large objects"})
	if err != nil {
		panic(fmt.Errorf("txn: large objects: %w", err))
	}
	return tx.LargeObjects()
}

// Prepare is pgx.Tx's.
func (t *handedTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.use(); err != nil {
		return nil, err
	}
	defer t.mu.Unlock()
	return t.conn.Prepare(ctx, name, sql)
}

// Exec is pgx.Tx's.
func (t *handedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.use(); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer t.mu.Unlock()
	return t.conn.Exec(ctx, sql, args...)
}

// Query is pgx.Tx's.
func (t *handedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.use(); err != nil {
		return closedRows{err: err}, err
	}
	defer t.mu.Unlock()
	return t.conn.Query(ctx, sql, args...) //nolint:sqlclosecheck // the function's to close
}

// QueryRow is pgx.Tx's.
func (t *handedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.use(); err != nil {
		return closedRows{err: err}
	}
	defer t.mu.Unlock()
	return t.conn.QueryRow(ctx, sql, args...)
}

// Conn is pgx.Tx's. A statement that ends the transaction there is misuse: see idempotency.ErrTransactionEnded.
func (t *handedTx) Conn() *pgx.Conn {
	if t.use() != nil {
		return nil
	}
	defer t.mu.Unlock()
	return t.conn
}

// closedRows and closedResults answer for a transaction that is over.
type closedRows struct{ err error }

var _ pgx.Rows = closedRows{}

func (r closedRows) Close()                                       {}
func (r closedRows) Err() error                                   { return r.err }
func (r closedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r closedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r closedRows) Next() bool                                   { return false }
func (r closedRows) Scan(...any) error                            { return r.err }
func (r closedRows) Values() ([]any, error)                       { return nil, r.err }
func (r closedRows) RawValues() [][]byte                          { return nil }
func (r closedRows) Conn() *pgx.Conn                              { return nil }
func (r closedRows) TypeMap() *pgtype.Map                         { return nil }

type closedResults struct{ err error }

func (r closedResults) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, r.err }
func (r closedResults) Query() (pgx.Rows, error)         { return closedRows(r), r.err }
func (r closedResults) QueryRow() pgx.Row                { return closedRows(r) }
func (r closedResults) Close() error                     { return r.err }
func (r closedResults) Tx() pgx.Tx                       { return nil }

type running struct {
	runner *Runner
	key    idempotency.Key
	tx     *handedTx
	outer  *running // of another runner, around this one
}

type runningKey struct{}

// FromContext returns the transaction that runs around ctx: the one handed to the function whose context it is.
func FromContext(ctx context.Context) (pgx.Tx, bool) {
	r, ok := ctx.Value(runningKey{}).(*running)
	if !ok || r.tx.over() {
		return nil, false
	}
	return r.tx, true
}

// Used reports whether the function that was given tx has asked anything of it so far, its connection too. One that never
// does writes elsewhere, if anywhere, and the commit protects nothing of that.
func Used(tx pgx.Tx) bool {
	t, ours := tx.(*handedTx)
	if !ours {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.used
}

func withRunning(ctx context.Context, c *call, tx *handedTx) context.Context {
	outer, _ := ctx.Value(runningKey{}).(*running)
	return context.WithValue(ctx, runningKey{}, &running{runner: c.runner, key: c.req.Key, tx: tx, outer: outer})
}

// nested reports a call from inside a function of the same runner: its key's transaction would wait for, or deadlock
// with, the one it is called in. And one of another runner that uses the same key in the same transaction, given as q:
// one of the two records would refuse the other.
func nested(ctx context.Context, r *Runner, q idempotency.Querier, key idempotency.Key) error {
	inside, _ := q.(*handedTx)
	outer, _ := ctx.Value(runningKey{}).(*running)
	for ; outer != nil; outer = outer.outer {
		same := outer.runner == r || inside != nil && inside.conn == outer.tx.conn && key == outer.key
		if same && !outer.tx.over() { // a context may outlive its function
			return idempotency.ErrNested
		}
	}
	return nil
}
