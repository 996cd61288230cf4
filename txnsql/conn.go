package txnsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgonce/pgonce/txn"
)

const connKey = "github.com/pgonce/pgonce/txnsql"

// conn is stdlib's connection in everything, but for the transactions on it: one that a runner has begun is not begun again,
// and neither that one nor one that a call has joined is ended by its sql.Tx.
type conn struct {
	*stdlib.Conn

	hands sync.Mutex        // never taken below database/sql's locks
	on    *sql.Conn         // a runner has the connection by it; nil: none has
	last  *handed           // the innermost; guarded by hands, as on
	stuck []<-chan struct{} // ends of sql.Txs that wait for rows; the runner's, as the connection

	mu      sync.Mutex
	joined  int  // calls of WithIdempotencyTx that are in the transaction
	refused bool // its end was asked for meanwhile
	closing bool // Close was
}

var (
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.ExecerContext      = (*conn)(nil)
	_ driver.QueryerContext     = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.SessionResetter    = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
)

// BeginTx sends nothing where the runner has begun.
func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if h, ours := ctx.Value(handKey{}).(*handed); ours {
		return h, nil
	}
	tx, err := c.Conn.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return &begunTx{Tx: tx, conn: c}, nil
}

// ExecContext answers a probe by itself: this runs below the locks of the sql.Tx that the probe was given to.
func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if len(args) == 1 {
		if p, is := args[0].Value.(*probe); is {
			if p.let != nil {
				close(p.holds)
				<-p.let
				return driver.RowsAffected(0), nil
			}
			p.conn = c
			c.mu.Lock()
			c.joined++
			c.mu.Unlock()
			return driver.RowsAffected(0), nil
		}
	}
	return c.Conn.ExecContext(ctx, query, args)
}

// Close waits for the calls that have joined the connection's transaction.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.joined > 0 {
		c.closing = true
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	return c.Conn.Close()
}

// leave is the end of a call that has joined.
func (c *conn) leave() {
	c.mu.Lock()
	c.joined--
	closes := c.closing && c.joined == 0
	c.mu.Unlock()
	if closes {
		_ = c.Conn.Close() // which rolls back
	}
}

// refusedEnd reports whether somebody has tried to end the transaction that calls have joined.
func (c *conn) refusedEnd() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused
}

// begunTx is a transaction of the program.
type begunTx struct {
	driver.Tx
	conn *conn
}

// Commit is refused while a call is in the transaction.
func (t *begunTx) Commit() error {
	if err := t.refuse(); err != nil {
		return err
	}
	return t.Tx.Commit()
}

// Rollback too. It may also be database/sql's own, because the transaction's context has ended.
func (t *begunTx) Rollback() error {
	if err := t.refuse(); err != nil {
		return err
	}
	return t.Tx.Rollback()
}

// refuse keeps the connection for the calls that are in the transaction: database/sql would give it to somebody else. Its
// sql.Tx is over all the same, so it is rolled back when they have ended.
func (t *begunTx) refuse() error {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.joined == 0 {
		return nil
	}
	c.refused = true
	return fmt.Errorf("%w, so it is rolled back now: %w", txn.ErrRunnerOwnsTransaction, driver.ErrBadConn) // dropped, not reused
}
