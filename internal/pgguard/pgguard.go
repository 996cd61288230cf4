// Package pgguard watches over the connections of a pool: none of them dials a cancel request for a COMMIT, and each
// remembers what the server has answered.
package pgguard

import (
	"context"
	"errors"
	"net"
	"reflect"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Configure gives every connection of the pool a Guard.
func Configure(config *pgxpool.Config) {
	if !Configured(config) {
		config.BeforeConnect = guardConnections(config.BeforeConnect)
	}
}

// Configured recognises the hook by its code: pgxpool copies configurations, and functions cannot be compared.
func Configured(config *pgxpool.Config) bool {
	return config.BeforeConnect != nil &&
		reflect.ValueOf(config.BeforeConnect).Pointer() == reflect.ValueOf(guardConnections(nil)).Pointer()
}

// Rule is what a pool must obey whose connections need a Guard, for the error of a constructor.
const Rule = "must be made from a configuration that went through txn.ConfigurePool, as its last hook"

// Guard is of one connection, and used by whoever has the connection.
type Guard struct {
	LastError        atomic.Pointer[pgconn.PgError]
	MayHaveCommitted atomic.Bool // a statement answered COMMIT, or BEGIN as the last of several
	Epoch            string      // of the session; empty: not asked yet

	commitSent atomic.Bool // no cancel request is dialed
}

// Of returns the connection's guard, or nil if it has none: the pool's hook was replaced after Configure.
func Of(conn *pgx.Conn) *Guard {
	g, _ := conn.PgConn().CustomData()[key].(*Guard)
	return g
}

const key = "github.com/pgonce/pgonce/internal/pgguard"

// Commit has send send what commits. A COMMIT by Exec does not need it.
func (g *Guard) Commit(conn *pgx.Conn, send func() error) error {
	g.commitSent.Store(true)
	err := send()
	g.committed(conn)
	return err
}

// committed leaves a connection that is closed as it is: pgx dials later.
func (g *Guard) committed(conn *pgx.Conn) {
	if !conn.IsClosed() {
		g.commitSent.Store(false)
	}
}

var (
	_ pgx.QueryTracer = (*Guard)(nil)
	_ pgx.BatchTracer = (*Guard)(nil)
)

// The guard is a tracer to see statements and their command tags, whichever way they went.

// TraceQueryStart sees the COMMIT that pgx sends for a pgx.Tx. This is the only place where that can be seen: a pool's
// transaction gives its connection back before its Commit returns.
func (g *Guard) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if (begins(data.SQL, "commit") || begins(data.SQL, "end")) && g.commitSent.CompareAndSwap(false, true) {
		return context.WithValue(ctx, commitKey{}, g)
	}
	return ctx
}

func begins(sql, word string) bool {
	return len(sql) >= len(word) && strings.EqualFold(sql[:len(word)], word)
}

type commitKey struct{}

// TraceQueryEnd is called when the connection is closed already, if it was lost.
func (g *Guard) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryEndData) {
	if ctx.Value(commitKey{}) == g {
		g.committed(conn)
	}
	g.see(data.CommandTag)
}

// TraceBatchStart is there for the interface.
func (*Guard) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

// TraceBatchQuery sees one statement of a batch.
func (g *Guard) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	g.see(data.CommandTag)
}

// TraceBatchEnd is there for the interface.
func (*Guard) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (g *Guard) see(tag pgconn.CommandTag) {
	switch tag.String() {
	case "COMMIT", "BEGIN", "START TRANSACTION", "PREPARE TRANSACTION":
		g.MayHaveCommitted.Store(true)
	}
}

var errCommitSent = errors.New("pgguard: no cancel request after COMMIT was sent")

// guardConnections is not inlined: its function's code must have one address, see Configured.
//
//go:noinline
func guardConnections(next func(context.Context, *pgx.ConnConfig) error) func(context.Context, *pgx.ConnConfig) error {
	return func(ctx context.Context, config *pgx.ConnConfig) error {
		if next != nil {
			if err := next(ctx, config); err != nil {
				return err
			}
		}
		g := &Guard{}
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
				g.LastError.Store(err)
			}
			return onError == nil || onError(conn, err)
		}
		if config.Tracer == nil {
			config.Tracer = g
		} else {
			config.Tracer = multitracer.New(config.Tracer, g)
		}
		config.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
			conn.CustomData()[key] = g
			if after != nil {
				return after(ctx, conn)
			}
			return nil
		}
		return nil
	}
}
