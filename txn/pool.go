package txn

import (
	"context"
	"errors"
	"net"
	"reflect"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// ConfigurePool prepares a pool's configuration for a Runner; call it before pgxpool.NewWithConfig, after setting hooks
// of your own. It does two things on every connection of the pool:
//
// From the moment COMMIT is sent, the connection dials no cancel request. pgx sends one whenever a connection breaks, and
// PostgreSQL answers it by committing without waiting for the synchronous standby: an acknowledged commit could be lost.
//
// The server's last error, and a COMMIT sent by a function itself, are remembered, so that a transaction which a
// serialization failure has aborted is run again even where the function hides that error, and one that the function has
// ended is not.
func ConfigurePool(config *pgxpool.Config) {
	if !configured(config) {
		config.BeforeConnect = guardConnections(config.BeforeConnect)
	}
}

// configured recognises the hook by its code: pgxpool copies configurations, and functions cannot be compared.
func configured(config *pgxpool.Config) bool {
	return config.BeforeConnect != nil &&
		reflect.ValueOf(config.BeforeConnect).Pointer() == reflect.ValueOf(guardConnections(nil)).Pointer()
}

// guard is one connection's part of what ConfigurePool does.
type guard struct {
	commitSent       atomic.Bool
	lastError        atomic.Pointer[pgconn.PgError]
	mayHaveCommitted atomic.Bool // a statement of the function answered COMMIT, or BEGIN as the last of several
	epoch            string      // of the session, used by whoever has the connection; empty: not asked yet
}

var (
	_ pgx.QueryTracer = (*guard)(nil)
	_ pgx.BatchTracer = (*guard)(nil)
)

// The guard is a tracer to see the command tags of the function's statements, whichever way they went.

func (*guard) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (g *guard) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	g.see(data.CommandTag)
}

func (*guard) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (g *guard) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	g.see(data.CommandTag)
}

func (*guard) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (g *guard) see(tag pgconn.CommandTag) {
	switch tag.String() {
	case "COMMIT", "BEGIN", "START TRANSACTION", "PREPARE TRANSACTION":
		g.mayHaveCommitted.Store(true)
	}
}

const guardKey = "github.com/pgonce/pgonce/txn"

var errCommitSent = errors.New("txn: no cancel request after COMMIT was sent")

// guardConnections is not inlined: its function's code must have one address, see configured.
//
//go:noinline
func guardConnections(next func(context.Context, *pgx.ConnConfig) error) func(context.Context, *pgx.ConnConfig) error {
	return func(ctx context.Context, config *pgx.ConnConfig) error {
		if next != nil {
			if err := next(ctx, config); err != nil {
				return err
			}
		}
		g := &guard{}
		dial, onError, after := config.DialFunc, config.OnPgError, config.AfterConnect
		config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if g.commitSent.Load() {
				return nil, errCommitSent
			}
			return dial(ctx, network, address)
		}
		config.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
			// Statements after the one that aborted the transaction only repeat that it is aborted: keep the cause.
			if err.Code != "25P02" {
				g.lastError.Store(err)
			}
			return onError == nil || onError(conn, err)
		}
		if config.Tracer == nil {
			config.Tracer = g
		} else {
			config.Tracer = multitracer.New(config.Tracer, g)
		}
		config.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
			conn.CustomData()[guardKey] = g
			if after != nil {
				return after(ctx, conn)
			}
			return nil
		}
		return nil
	}
}

var errPoolNotConfigured = &idempotency.ConfigError{
	Field: "pool",
	Rule:  "must be made from a configuration that went through txn.ConfigurePool, as its last hook",
}

// guardOf returns the connection's guard, or an error if the pool's hook was replaced after ConfigurePool.
func guardOf(conn *pgx.Conn) (*guard, error) {
	g, ok := conn.PgConn().CustomData()[guardKey].(*guard)
	if !ok {
		return nil, errPoolNotConfigured
	}
	return g, nil
}
