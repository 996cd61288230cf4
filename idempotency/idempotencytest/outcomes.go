package idempotencytest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// RolledBack returns a runner whose calls are all part of one transaction, and that transaction, for the test to look into:
// it is rolled back when the test ends, and nothing of it stays. Calls run one after the other.
func RolledBack(t testing.TB, pool *pgxpool.Pool, r *txn.Runner) (*txn.Runner, pgx.Tx) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return r.Within(tx), tx
}

// Succeeded records value as the outcome of the request: what the program under test asks next is a replay of it.
func Succeeded[T any](t testing.TB, r *txn.Runner, req idempotency.Request, value T) {
	t.Helper()
	res, err := txn.WithIdempotency(t.Context(), r, req, func(context.Context, pgx.Tx) (T, error) { return value, nil })
	require.NoError(t, err)
	require.False(t, res.Replayed, "the key has an outcome already: take another key")
}

// Failed records a final failure, with value as its body, as the outcome of the request.
func Failed[T any](t testing.TB, r *txn.Runner, req idempotency.Request, code, message string, value T) {
	t.Helper()
	_, err := txn.WithIdempotency(t.Context(), r, req, func(context.Context, pgx.Tx) (T, error) {
		return value, txn.Final(code, errors.New(message))
	})
	require.ErrorIs(t, err, idempotency.ErrFailed)
}

// Mismatched records an outcome of the key for another payload: the request is refused with idempotency.ErrMismatch.
func Mismatched(t testing.TB, r *txn.Runner, req idempotency.Request) {
	t.Helper()
	other := req
	other.Fingerprint = idempotency.FingerprintBytes([]byte("idempotencytest: another payload"))
	Succeeded(t, r, other, "")
}

// InProgress makes the key look as if another process were running it, until release is called or the test ends.
func InProgress(t testing.TB, pool *pgxpool.Pool, key idempotency.Key) (release func()) {
	t.Helper()
	// A connection of its own: the program under test may have use for every one of the pool.
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig.Copy())
	require.NoError(t, err)
	tx, err := conn.Begin(t.Context())
	release = sync.OnceFunc(func() {
		ctx := context.WithoutCancel(t.Context())
		if err == nil {
			_ = tx.Rollback(ctx) // a closed connection lets go of the key a moment later
		}
		_ = conn.Close(ctx)
	})
	t.Cleanup(release)
	require.NoError(t, err)
	var locked bool
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_try_advisory_xact_lock($1)`, key.LockID()).Scan(&locked))
	require.True(t, locked, "somebody is running the key")
	return release
}

// Plug is a pool's way to PostgreSQL, for tests of what a program does when an outcome stays unknown.
type Plug struct {
	mu       sync.Mutex
	atCommit bool
	out      bool
	conns    map[*pluggedConn]bool
}

var errPlug = errors.New("idempotencytest: the plug is out")

// NewPlug puts a plug into a pool's configuration; call it before pgxpool.NewWithConfig.
func NewPlug(config *pgxpool.Config) *Plug {
	p := &Plug{conns: map[*pluggedConn]bool{}}
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if p.isOut() {
			return nil, errPlug
		}
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c := &pluggedConn{Conn: conn, plug: p}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.conns[c] = true
		return c, nil
	}
	return p
}

// OutAtCommit pulls the plug as soon as the next COMMIT has been sent: it is done, and nobody is told. The call ends with
// idempotency.ErrOutcomeUnknown after txn.Config.CommitTimeout, which a test should make short.
func (p *Plug) OutAtCommit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.atCommit = true
}

// In puts it back.
func (p *Plug) In() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.atCommit, p.out = false, false
}

func (p *Plug) isOut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out
}

// pull reports whether these bytes hold the COMMIT that pulls the plug.
func (p *Plug) pull(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.atCommit && holdsCommit(b) {
		p.atCommit, p.out = false, true
		return true
	}
	return false
}

// holdsCommit finds our COMMIT where it is executed: by its statement's name in a Bind, behind the empty name of a portal, or
// by its text in a Parse without a name. Where it is only prepared, its name stands before its text.
func holdsCommit(b []byte) bool {
	return bytes.Contains(b, []byte("\x00pgonce_commit\x00")) ||
		bytes.Contains(b, []byte("\x00COMMIT\x00")) && !bytes.Contains(b, []byte("pgonce_commit\x00COMMIT\x00"))
}

type pluggedConn struct {
	net.Conn
	plug *Plug
	mute atomic.Bool
}

// Read loses what PostgreSQL answers to the COMMIT that pulled the plug.
func (c *pluggedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.mute.Load() {
		return 0, errPlug
	}
	return n, err
}

func (c *pluggedConn) Write(b []byte) (int, error) {
	pulled := c.plug.pull(b)
	if pulled {
		c.mute.Store(true)
	}
	n, err := c.Conn.Write(b)
	if pulled {
		time.Sleep(100 * time.Millisecond) // PostgreSQL has read it by then: a cut connection is no reason to stop
		c.plug.cut()
	}
	return n, err
}

// cut ends every connection.
func (p *Plug) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
		delete(p.conns, c)
	}
}

// RequireExecutedOnce calls many times at once and then some times more, and requires that there is one effect in the end.
// call may return idempotency.ErrInProgress, and nothing else that is an error.
func RequireExecutedOnce(t testing.TB, call func(ctx context.Context) error, effects func(ctx context.Context) int) {
	t.Helper()
	const callers, more = 20, 3
	errs := make([]error, callers, callers+more)
	var group sync.WaitGroup
	for i := range callers {
		group.Go(func() { errs[i] = call(t.Context()) })
	}
	group.Wait()
	for range more {
		errs = append(errs, call(t.Context()))
	}
	for _, err := range errs {
		if !errors.Is(err, idempotency.ErrInProgress) {
			require.NoError(t, err)
		}
	}
	require.Equal(t, 1, effects(t.Context()), "effects of %d calls", callers+more)
}
