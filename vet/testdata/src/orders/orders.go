// Package orders has functions that go past their transaction.
package orders

import (
	"context"
	"database/sql"
	"net/http"
	"store"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
	"google.golang.org/grpc"
)

type service struct {
	runner *txn.Runner
	pool   *pgxpool.Pool
	db     *sql.DB
	conn   *pgx.Conn
	store  *store.Store
	client http.Client
	stock  stockClient
	ship   shippingClient
	direct *connect.Client[int, int]
	q      *store.Queries
	dbtx   store.DBTX
}

type embedding struct{ *pgxpool.Pool }

type stockClient interface {
	Reserve(ctx context.Context, sku string, opts ...grpc.CallOption) error
}

type shippingClient interface {
	Ship(ctx context.Context, req *connect.Request[int]) (*connect.Response[int], error)
}

// Ship is a handler, which may be called like any function.
func (s *service) Ship(ctx context.Context, req *connect.Request[int]) (*connect.Response[int], error) {
	return nil, nil
}

var req idempotency.Request

func (s *service) pools(ctx context.Context, pool *pgxpool.Pool, e embedding) {
	_, _ = txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, _ = tx.Exec(ctx, `SELECT 1`)
		_, _ = s.pool.Exec(ctx, `SELECT 1`)          // want `the function calls \(\*pgxpool.Pool\).Exec: what it writes there stays .* use the transaction`
		_ = pool.QueryRow(ctx, `SELECT 1`)           // want `calls \(\*pgxpool.Pool\).QueryRow`
		_, _ = pool.Query(ctx, `SELECT 1`)           // want `calls \(\*pgxpool.Pool\).Query`
		_ = pool.SendBatch(ctx, nil)                 // want `calls \(\*pgxpool.Pool\).SendBatch`
		_, _ = pool.CopyFrom(ctx, nil, nil)          // want `calls \(\*pgxpool.Pool\).CopyFrom`
		other, _ := pool.Begin(ctx)                  // want `calls \(\*pgxpool.Pool\).Begin`
		_, _ = other.Exec(ctx, `SELECT 1`)           // its Begin was told
		_, _ = e.Exec(ctx, `SELECT 1`)               // want `calls \(\*pgxpool.Pool\).Exec`
		acquired, _ := s.pool.Acquire(ctx)           // want `calls \(\*pgxpool.Pool\).Acquire`
		_, _ = acquired.Exec(ctx, `SELECT 1`)        // want `calls \(\*pgxpool.Conn\).Exec`
		conn := acquired.Conn()                      // want `calls \(\*pgxpool.Conn\).Conn`
		_, _ = conn.Exec(ctx, `SELECT 1`)            // want `calls \(\*pgx.Conn\).Exec`
		_, _ = s.conn.Exec(ctx, `SELECT 1`)          // want `calls \(\*pgx.Conn\).Exec`
		mine, _ := pgx.Connect(ctx, "")              // a connection is no harm
		_, _ = mine.Exec(ctx, `SELECT 1`)            // want `calls \(\*pgx.Conn\).Exec`
		_, _ = s.db.ExecContext(ctx, `SELECT 1`)     // want `calls \(\*sql.DB\).ExecContext`
		_, _ = s.db.BeginTx(ctx, nil)                // want `calls \(\*sql.DB\).BeginTx`
		_ = pgx.BeginFunc(ctx, s.pool, nil)          // want `gives a pool or a connection to pgx.BeginFunc`
		_ = store.New(s.pool).Insert(ctx)            // want `gives a pool or a connection to store.New`
		_ = store.Save(ctx, pool)                    // want `gives a pool or a connection to store.Save` `calls Save, which calls its Exec \(store.go:\d+\)`
		_ = store.SaveOn(ctx, conn)                  // want `calls SaveOn, which calls \(\*pgx.Conn\).Exec \(store.go:\d+\)`
		_ = s.store.Audit(ctx, "x")                  // want `calls Audit, which calls \(\*pgxpool.Pool\).Exec \(store.go:\d+\)`
		_ = s.store.Deeper(ctx)                      // want `calls Deeper, which calls \(\*pgxpool.Pool\).Exec \(store.go:\d+\)`
		_ = s.local(ctx)                             // want `calls local, which calls \(\*pgxpool.Pool\).Exec \(orders.go:\d+\)`
		_ = through(ctx, pool)                       // want `calls through, which calls its Exec` `gives a pool or a connection to orders.through`
		_ = typed(ctx, pool)                         // want `calls typed, which calls \(\*pgxpool.Pool\).Exec`
		func() { _, _ = pool.Exec(ctx, `SELECT`) }() // want `calls \(\*pgxpool.Pool\).Exec`
		return 0, nil
	})
}

var global *store.Queries

// What was made with a pool, or with who knows what, before the function began.
func (s *service) queries(ctx context.Context, q *store.Queries, outer pgx.Tx) {
	_, _ = txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_ = s.q.Insert(ctx)                 // want `calls Insert, which calls its Exec \(store.go:\d+\)`
		_ = s.q.Twice(ctx)                  // want `calls Twice, which calls its Exec`
		_ = q.Insert(ctx)                   // want `calls Insert`
		_ = global.Insert(ctx)              // want `calls Insert`
		_ = s.byField(ctx)                  // want `calls byField, which calls its Exec`
		_ = byQueries(ctx, s.q)             // want `calls byQueries, which calls its Exec`
		_, _ = s.dbtx.Exec(ctx, `SELECT 1`) // want `calls \(store.DBTX\).Exec of what was there before the transaction`
		_ = store.Save(ctx, s.dbtx)         // want `calls Save, which calls its Exec`
		again := s.q
		_ = again.Insert(ctx) // want `calls Insert`
		_ = s.q.WithTx(tx).Insert(ctx)
		mine := s.q.WithTx(tx)
		_ = mine.Twice(ctx)
		_ = byQueries(ctx, store.New(tx))
		unit := service{q: mine}
		_ = unit.q.Insert(ctx)
		return 0, nil
	})
	before := q.WithTx(outer)
	_, _ = txn.WithIdempotencyTx(ctx, s.runner, outer, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		return 0, before.Insert(ctx) // it may be of the caller's transaction
	})
	_, _ = txn.WithIdempotency(ctx, s.runner, req, s.place)
}

func (s *service) place(ctx context.Context, tx pgx.Tx) (int, error) { // want place:"1 effects"
	return 0, s.q.Insert(ctx) // want `calls Insert`
}

func (s *service) byField(ctx context.Context) error { return s.q.Insert(ctx) } // want byField:"1 effects"

func byQueries(ctx context.Context, q *store.Queries) error { return q.Insert(ctx) } // want byQueries:"1 effects"

func (s *service) local(ctx context.Context) error { // want local:"1 effects"
	_, err := s.pool.Exec(ctx, `SELECT 1`)
	return err
}

func through(ctx context.Context, db store.DBTX) error { return store.Save(ctx, db) } // want through:"1 effects"

func typed(ctx context.Context, pool *pgxpool.Pool) error { // want typed:"1 effects"
	_, err := pool.Exec(ctx, `SELECT 1`)
	return err
}

// Every entrance, and every way to give it a function.
func (s *service) entrances(ctx context.Context, outer pgx.Tx) {
	bad := func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, err := s.pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		return 0, err
	}
	_, _ = txn.WithIdempotencyTx(ctx, s.runner, outer, req, bad)
	_, _ = txn.WithIdempotency(ctx, s.runner, req, s.method)
	_, _ = txn.WithIdempotency(ctx, s.runner, req, s.store.Handle) // want `the function calls Handle, which calls \(\*pgxpool.Pool\).Exec \(store.go:\d+\)`
	_, _ = txn.WithIdempotency(ctx, s.runner, req, generic[int])
	_, _ = txn.WithIdempotency(ctx, s.runner, req, s.maker("tea"))
	_, _ = txn.WithIdempotencyMany(ctx, s.runner, nil, func(ctx context.Context, tx pgx.Tx, i int) (int, error) {
		return 0, s.local(ctx) // want `calls local`
	})
	_, _ = txn.WithLease(ctx, s.runner, req, func(ctx context.Context, l *txn.Lease) (int, error) {
		_, _ = s.pool.Exec(ctx, `SELECT 1`) // outside any transaction
		_, err := http.Get("http://localhost/pay")
		return 0, err
	}, func(ctx context.Context, tx pgx.Tx, n int) (int, error) {
		return 0, s.local(ctx) // want `calls local`
	})
}

func (s *service) method(ctx context.Context, tx pgx.Tx) (int, error) { // want method:"1 effects"
	return 0, s.local(ctx) // want `calls local`
}

func generic[T any](ctx context.Context, tx pgx.Tx) (zero T, err error) { // want generic:"1 effects"
	return zero, store.Notify() // want `calls Notify, which calls http.Get`
}

func (s *service) maker(sku string) func(context.Context, pgx.Tx) (int, error) {
	return func(ctx context.Context, tx pgx.Tx) (int, error) {
		return 0, s.local(ctx) // want `calls local`
	}
}

func (s *service) transactions(ctx context.Context, before pgx.Tx) { // want transactions:"1 effects"
	begun, _ := s.pool.Begin(ctx)
	_, _ = txn.WithIdempotencyTx(ctx, s.runner, begun, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, _ = begun.Exec(ctx, `SELECT 1`)  // want `uses a transaction from around it: it is the runner's to end`
		_, _ = before.Exec(ctx, `SELECT 1`) // want `uses a transaction from around it`
		_ = store.Save(ctx, begun)          // want `gives store.Save a transaction from around it`
		defer tx.Rollback(ctx)              // want `the function ends the transaction: it is the runner's to end, by what the function returns`
		_, _ = tx.Exec(ctx, "COMMIT")       // want `ends the transaction`
		_, _ = tx.Exec(ctx, "rollback to savepoint mine")
		_, _ = tx.Exec(ctx, "ROLLBACK; BEGIN") // want `ends the transaction`
		_ = store.Finish(ctx, tx)              // want `calls Finish, which ends the transaction`
		inside, _ := txn.FromContext(ctx)
		_ = inside.Commit(ctx) // want `ends the transaction`
		go func() {            // want `gives the transaction to a goroutine`
			_, _ = tx.Exec(ctx, `SELECT 1`)
		}()
		go store.Save(ctx, tx) // want `gives the transaction to a goroutine`
		return 0, nil
	})
}

func (s *service) calls(ctx context.Context, r *http.Request) {
	_, _ = txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, _ = s.client.Do(r)                                             // want `calls \(\*http.Client\).Do: no rollback takes that back, .* first function of txn.WithLease`
		_, _ = http.DefaultTransport.RoundTrip(r)                         // want `calls \(http.RoundTripper\).RoundTrip`
		_, _ = http.Post("http://localhost/pay", "application/json", nil) // want `calls http.Post`
		_, _ = s.ship.Ship(ctx, nil)                                      // want `calls \(orders.shippingClient\).Ship`
		_, _ = s.direct.CallUnary(ctx, nil)                               // want `calls \(\*connect.Client.*\).CallUnary`
		_, _ = s.Ship(ctx, nil)
		_ = s.stock.Reserve(ctx, "tea") // want `calls \(orders.stockClient\).Reserve`
		return 0, store.Notify()        // want `calls Notify, which calls http.Get`
	})
}
