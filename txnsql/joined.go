package txnsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// WithIdempotencyTx is WithIdempotency in a transaction that the caller has begun, on a sql.DB of OpenDB or OpenDBFromPool, and
// will commit. It is txn.WithIdempotencyTx in all: it never waits, fn runs in a savepoint, its error leaves nothing and the
// caller may go on, and Joined.AfterCommit tells, after the commit, whether the outcome counts. Rows of the caller must be closed.
//
// fn gets tx itself. It must not call Commit or Rollback: that, as the end of the context that tx was begun with, rolls the
// whole transaction back.
func WithIdempotencyTx[T any](ctx context.Context, r *Runner, tx *sql.Tx, req idempotency.Request, fn func(context.Context, *sql.Tx) (T, error)) (*txn.Joined[T], error) {
	c, err := join(ctx, tx)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	release := hold(ctx, tx)
	defer func() { release() }()
	var outer pgx.Tx = &callersTx{conn: c.Conn.Conn()}
	if h := c.handedAs(tx); h != nil {
		outer = h.inner // of another runner's function
	}
	return txn.WithIdempotencyTx(ctx, r.Runner, outer, req, func(ctx context.Context, inner pgx.Tx) (value T, err error) {
		h := &handed{tx: tx, inner: inner, conn: c}
		c.hands.Lock()
		c.push(h)
		c.hands.Unlock()
		defer func() {
			c.hands.Lock()
			c.remove(h)
			c.hands.Unlock()
			if err == nil && c.refusedEnd() {
				err = errOuterOver
			}
		}()
		release()
		defer func() { release = hold(ctx, tx) }() // for a panic and Goexit too: the savepoint is rolled back then
		return fn(ctx, tx)
	})
}

var errOuterOver = fmt.Errorf("txnsql: the caller's transaction is over, its context has ended or the function has called Commit or Rollback: %w", sql.ErrTxDone)

// handedAs finds the function of a runner that was handed tx.
func (c *conn) handedAs(tx *sql.Tx) *handed {
	c.hands.Lock()
	defer c.hands.Unlock()
	for h := c.last; h != nil; h = h.outer {
		if h.tx == tx {
			return h
		}
	}
	return nil
}

// probe is an argument by which a sql.Tx tells its connection. Nothing of it reaches a server: our connections answer by
// themselves, pgx's asks it for the statement to send, and no other driver can take it.
type probe struct {
	conn       *conn
	holds, let chan struct{} // of one that holds the connection: closed when it does, and when it shall no more
}

var _ pgx.QueryRewriter = (*probe)(nil)

// RewriteQuery is pgx.QueryRewriter's.
func (*probe) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return "", nil, errForeignTx
}

var errForeignTx = &idempotency.ConfigError{
	Field: "tx", Rule: "must be of a sql.DB that was opened by txnsql.OpenDB or OpenDBFromPool, and over pgx",
}

// join enters the transaction: until leave its connection is nobody else's.
func join(ctx context.Context, tx *sql.Tx) (*conn, error) {
	if tx == nil {
		return nil, &idempotency.ConfigError{Field: "tx", Rule: "must not be nil"}
	}
	p := &probe{}
	// Without the caller's cancellation: the probe sends nothing, and a driver that knows it not must not get to blame the context.
	_, err := tx.ExecContext(context.WithoutCancel(ctx), "", p)
	switch {
	case p.conn != nil:
		return p.conn, nil
	case errors.Is(err, sql.ErrTxDone):
		return nil, fmt.Errorf("txnsql: join transaction: %w", err)
	}
	return nil, fmt.Errorf("%w (%v)", errForeignTx, err) //nolint:errorlint // the other driver's words, for a person
}

// hold keeps tx for the call until release: it is the caller's own, and a goroutine that the function has left behind may go on
// with it. Its statements wait meanwhile, since a probe is one, for database/sql, that takes its time.
func hold(ctx context.Context, tx *sql.Tx) (release func()) {
	p := &probe{holds: make(chan struct{}), let: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = tx.ExecContext(context.WithoutCancel(ctx), "", p)
	}()
	timer := time.NewTimer(2 * rowsTimeout)
	defer timer.Stop()
	select {
	case <-p.holds:
		return func() { close(p.let); <-ended }
	case <-ended:
		return func() {} // tx is over, nobody can use it
	case <-timer.C:
		// A statement runs still, or the end of tx waits for rows scanned into sql.RawBytes: the connection is busy, which is an error
		// of the call.
		return func() { close(p.let) }
	}
}

// callersTx is the caller's transaction, with what txn.WithIdempotencyTx asks of one. The rest of pgx.Tx is nil.
type callersTx struct {
	pgx.Tx
	conn *pgx.Conn
}

func (t *callersTx) Conn() *pgx.Conn { return t.conn }

func (t *callersTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	return t.conn.Exec(ctx, query, args...)
}

func (t *callersTx) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	return t.conn.Query(ctx, query, args...)
}

func (t *callersTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	return t.conn.QueryRow(ctx, query, args...)
}

func (t *callersTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.conn.SendBatch(ctx, b)
}
