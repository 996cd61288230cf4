package txnsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/txn"
)

// handed is the sql.Tx that one function has got. As a driver.Tx it ends nothing.
type handed struct {
	tx    *sql.Tx
	inner pgx.Tx // the same transaction, as txn has given it out
	conn  *conn
	outer *handed

	ending     atomic.Bool   // the function has returned
	rolledBack atomic.Bool   // the function has called Rollback
	over       chan struct{} // closed when database/sql has ended the sql.Tx, whoever asked for it
}

type handKey struct{}

var _ driver.Tx = (*handed)(nil)

// Commit is the runner's. Of Commit and Rollback database/sql calls one, once.
func (h *handed) Commit() error {
	close(h.over)
	return txn.ErrRunnerOwnsTransaction
}

// Rollback is the runner's too. But what its caller has rolled back must not be committed, whatever the function returns: the
// transaction is spoilt.
func (h *handed) Rollback() error {
	defer close(h.over)
	if h.ending.Load() {
		return nil
	}
	h.rolledBack.Store(true)
	h.conn.spoil()
	return txn.ErrRunnerOwnsTransaction
}

const (
	spoilSQL     = `DO $$BEGIN RAISE EXCEPTION 'the function called Rollback of its sql.Tx: return an error instead'; END$$`
	spoilTimeout = 5 * time.Second
)

// spoil aborts the transaction by an error.
func (c *conn) spoil() {
	pc := c.Conn.Conn()
	if pc.IsClosed() || pc.PgConn().TxStatus() != 'T' {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), spoilTimeout)
	defer cancel()
	if err := pc.PgConn().Exec(ctx, spoilSQL).Close(); err == nil || pc.PgConn().TxStatus() == 'T' {
		_ = pc.Close(ctx) // nothing but the end of the session is left
	}
}

// errRolledBack is the end of a function that returns nil after a Rollback.
var errRolledBack = errors.Join(errors.New("txnsql: the function called Rollback of its sql.Tx and returned nil"), txn.ErrRunnerOwnsTransaction)

// FromContext returns the transaction that runs around ctx: the one handed to the function whose context it is. It works in the
// functions and handlers of every edge whose runner is Runner.Runner. txn.FromContext returns the same transaction as a pgx.Tx,
// for what database/sql does not have, such as CopyFrom.
func FromContext(ctx context.Context) (*sql.Tx, bool) {
	h := handedIn(ctx)
	if h == nil {
		return nil, false
	}
	return h.tx, true
}

func handedIn(ctx context.Context) *handed {
	inner, running := txn.FromContext(ctx)
	if !running {
		return nil
	}
	pc := inner.Conn()
	if pc == nil {
		return nil // has just ended
	}
	c, ours := pc.PgConn().CustomData()[connKey].(*conn)
	if !ours {
		return nil // the runner is one of a pgxpool.Pool
	}
	return c.hand(ctx, inner)
}

// hand returns the function's sql.Tx, and makes it when it is asked for first; nil: the connection is no runner's, or the
// function has returned.
func (c *conn) hand(ctx context.Context, inner pgx.Tx) *handed {
	c.hands.Lock()
	defer c.hands.Unlock()
	for h := c.last; h != nil; h = h.outer {
		if h.inner == inner {
			return h
		}
	}
	until, ends := inner.(interface{ AtEnd(func()) bool })
	if c.on == nil || !ends {
		return nil
	}
	h := &handed{inner: inner, conn: c, over: make(chan struct{})}
	var err error
	// Not the caller's context: at its end database/sql would end the sql.Tx behind the function's back. Its statements obey it.
	if h.tx, err = c.on.BeginTx(context.WithValue(context.WithoutCancel(ctx), handKey{}, h), nil); err != nil {
		return nil
	}
	c.push(h)
	if !until.AtEnd(h.end) {
		c.remove(h)
		h.close()
		return nil
	}
	return h
}

// end takes the sql.Tx away from the function.
func (h *handed) end() {
	h.close()
	if h.rolledBack.Load() && len(h.conn.stuck) == 0 {
		h.conn.spoil() // once more: a savepoint that was rolled back has brought the transaction back to life
	}
	h.conn.hands.Lock()
	h.conn.remove(h)
	h.conn.hands.Unlock()
}

// rowsTimeout is how long, twice, the end of a sql.Tx waits while no statement runs on it. Only what stands between two
// of a goroutine's statements may need it.
const rowsTimeout = 3 * time.Second

// close ends the sql.Tx: rows that were left open are closed, a statement that runs is waited for. Rows that were scanned into
// sql.RawBytes cannot be closed from here, and database/sql would wait for them for ever: they are left, see lent.Release.
func (h *handed) close() {
	h.ending.Store(true)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if errors.Is(h.tx.Rollback(), sql.ErrTxDone) { // sends nothing
			<-h.over // a goroutine of the function was faster, and may be at it still
		}
	}()
	timer := time.NewTimer(rowsTimeout)
	defer timer.Stop()
	for range 2 {
		select {
		case <-ended:
			return
		case <-timer.C:
			_ = h.conn.on.Raw(func(any) error { return nil }) // behind the statement that runs
			timer.Reset(rowsTimeout)
		}
	}
	h.conn.stuck = append(h.conn.stuck, ended)
}

func (c *conn) push(h *handed) { h.outer, c.last = c.last, h }

func (c *conn) remove(h *handed) {
	for at := &c.last; *at != nil; at = &(*at).outer {
		if *at == h {
			*at = h.outer
			return
		}
	}
}
