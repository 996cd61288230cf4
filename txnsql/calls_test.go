package txnsql_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

func TestMany_OutcomePerKey(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	boom := errors.New("boom")
	_, err := s.place(t.Context(), request(t, create, "k3", "body"))
	require.NoError(t, err)
	reqs := make([]idempotency.Request, 6)
	for i := range reqs {
		reqs[i] = request(t, create, fmt.Sprint("k", i), "body")
	}
	outcomes, err := txnsql.WithIdempotencyMany(t.Context(), s.runner, reqs, func(ctx context.Context, tx *sql.Tx, i int) (int64, error) {
		within, running := txnsql.FromContext(ctx)
		require.True(t, running)
		require.Same(t, tx, within)
		id, err := insertOrder(ctx, tx, reqs[i].Key.Value())
		switch i {
		case 1:
			return 0, boom
		case 2:
			return 0, txn.Final("no", boom)
		case 4:
			_ = tx.Rollback()
		}
		return id, err
	})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[1].Err, boom)
	require.ErrorIs(t, outcomes[2].Err, idempotency.ErrFailed)
	require.True(t, outcomes[3].Replayed)
	require.ErrorIs(t, outcomes[4].Err, txn.ErrRunnerOwnsTransaction)
	for _, i := range []int{0, 3, 5} {
		require.NoError(t, outcomes[i].Err)
		s.requireOnce(t, reqs[i], outcomes[i].Value)
	}
	s.requireNothing(t, reqs[1])
	require.Equal(t, "FAILED", s.state(t, reqs[2]))
	s.requireNothing(t, reqs[4])
}

func TestLease_CommitIsASQLTx(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	req := request(t, pay, "k", "body")
	for i := range 2 {
		res, err := txnsql.WithLease(t.Context(), s.runner, req,
			func(ctx context.Context, l *txn.Lease) (string, error) {
				_, running := txnsql.FromContext(ctx)
				require.False(t, running)
				return txn.Step(ctx, l, "charge", func(context.Context, string) (string, error) { return "charged", nil })
			},
			func(ctx context.Context, tx *sql.Tx, charge string) (string, error) {
				_, err := insertOrder(ctx, tx, charge)
				return charge, err
			})
		require.NoError(t, err)
		require.Equal(t, i == 1, res.Replayed)
		require.Equal(t, "charged", res.Value)
	}
	require.Equal(t, 1, s.orders(t, "charged"))
}

// A function of an edge is txn's; the sql.Tx in it is the same transaction.
func TestFromContext_InTheFunctionOfAnEdge(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	var kept context.Context
	res, err := txn.WithIdempotency(t.Context(), s.runner.Runner, req, func(ctx context.Context, ptx pgx.Tx) (int64, error) {
		kept = ctx
		tx, running := txnsql.FromContext(ctx)
		require.True(t, running)
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				again, _ := txnsql.FromContext(ctx)
				if again != tx {
					panic("another sql.Tx")
				}
			})
		}
		group.Wait()
		id, err := insertOrder(ctx, tx, "k")
		require.NoError(t, err)
		var seen int
		require.NoError(t, ptx.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&seen))
		require.Equal(t, 1, seen)
		return id, nil
	})
	require.NoError(t, err)
	_, running := txnsql.FromContext(kept)
	require.False(t, running)
	_, running = txnsql.FromContext(t.Context())
	require.False(t, running)
	s.requireOnce(t, req, res.Value)

	// The runner of a pgxpool.Pool has no sql.Tx, on whatever connection.
	config := s.direct.Config()
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	beside := txnsql.OpenDBFromPool(pool)
	require.NoError(t, beside.PingContext(t.Context()))
	require.NoError(t, beside.Close()) // the pool keeps the connection, which was a sql.DB's
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	_, err = txn.WithIdempotency(t.Context(), runner, request(t, create, "pool", "body"), func(ctx context.Context, _ pgx.Tx) (int64, error) {
		_, running := txnsql.FromContext(ctx)
		require.False(t, running)
		return 0, nil
	})
	require.NoError(t, err)
}

// An edge with such a runner: its handler writes through the *sql.Tx.
func TestFromContext_InAnHTTPHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	once, err := idempotencyhttp.New(s.runner.Runner, func(*http.Request) (string, error) { return "c-7", nil }, nil)
	require.NoError(t, err)
	handler := once.Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, running := txnsql.FromContext(r.Context())
		id, err := insertOrder(r.Context(), tx, "by http")
		switch {
		case !running || err != nil:
			http.Error(w, "no order today", http.StatusInternalServerError)
		case r.ContentLength == 3:
			http.Error(w, "sold out", http.StatusGone)
		default:
			_, _ = fmt.Fprint(w, "order ", id)
		}
	}))
	post := func(key, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader(body))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	for range 2 {
		require.Equal(t, http.StatusGone, post(`"refused"`, "tea").Code)
		require.Zero(t, s.orders(t, "by http"), "rolled back")
	}
	for i := range 2 {
		w := post(`"taken"`, "coffee")
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, i == 1, w.Header().Get("Idempotent-Replayed") == "true")
		require.Equal(t, 1, s.orders(t, "by http"))
	}
}

// Whoever waits for a key has no connection: a hundred wait beside an owner that has the only one.
func TestCase_D02_WaitersHoldNoConnection(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(2)
	other := newRunner(t, s.db) // of another process, as far as the library can tell
	req := request(t, create, "k", "body")
	entered, leave := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	var owner txn.Result[int64]
	var ownerErr error
	group.Go(func() {
		owner, ownerErr = s.call(t.Context(), req, func(context.Context, *sql.Tx) error { close(entered); <-leave; return nil })
	})
	<-entered
	const waiters = 100
	errs := make([]error, waiters)
	for i := range waiters {
		group.Go(func() {
			runner := s.runner
			if i%2 == 0 {
				runner = other
			}
			for { // the machine may be busy for longer than Wait
				var res txn.Result[int64]
				res, errs[i] = txnsql.WithIdempotency(t.Context(), runner, req, func(context.Context, *sql.Tx) (int64, error) { return 0, errors.New("ran twice") })
				if !errors.Is(errs[i], idempotency.ErrInProgress) {
					if errs[i] == nil && !res.Replayed {
						errs[i] = errors.New("no replay")
					}
					return
				}
			}
		})
	}
	for i := range 20 { // others get the second connection
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		_, err := s.place(ctx, request(t, create, fmt.Sprint("beside", i), "body"))
		cancel()
		require.NoError(t, err)
	}
	close(leave)
	group.Wait()
	require.NoError(t, ownerErr)
	require.NoError(t, errors.Join(errs...))
	s.requireOnce(t, req, owner.Value)
}

// A call takes one connection, and a sql.DB of one serves everybody.
func TestCall_OneConnectionServesMany(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	var group sync.WaitGroup
	errs := make([]error, 64)
	for i := range errs {
		group.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			_, errs[i] = s.call(ctx, request(t, create, fmt.Sprint("k", i%16), "body"), func(context.Context, *sql.Tx) error {
				if used := s.db.Stats().InUse; used != 1 {
					return fmt.Errorf("%d connections in use", used)
				}
				return nil
			})
		})
	}
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, s.runner.Check(t.Context()))
}

// writes counts what a connection sends.
type writes struct {
	net.Conn
	n *atomic.Int64
}

func (w writes) Write(b []byte) (int, error) {
	w.n.Add(1)
	return w.Conn.Write(b)
}

// Three round trips: acquire, the function's statement, record and COMMIT. The *sql.Tx begins and ends nothing.
func TestCall_TheSQLTxCostsNoRoundTrip(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var n atomic.Int64
	config := s.direct.Config().ConnConfig
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return writes{conn, &n}, err
	}
	counted := *s
	counted.db = txnsql.OpenDB(config)
	t.Cleanup(func() { require.NoError(t, counted.db.Close()) })
	counted.db.SetMaxOpenConns(1)
	counted.runner = newRunner(t, counted.db)
	fewest := int64(1000)
	for i := range 20 { // the first one prepares, and one on a busy machine may ping
		before := n.Load()
		_, err := counted.place(t.Context(), request(t, create, fmt.Sprint("k", i), "body"))
		require.NoError(t, err)
		fewest = min(fewest, n.Load()-before)
	}
	require.EqualValues(t, 3, fewest)
}

func TestNew_RefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	config := func() *pgx.ConnConfig { return s.direct.Config().ConnConfig }
	unhooked, err := pgxpool.New(t.Context(), s.direct.Config().ConnString())
	require.NoError(t, err)
	t.Cleanup(unhooked.Close)
	simple := config()
	simple.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	operations := &txn.Config{Operations: []idempotency.Operation{create}}
	for _, c := range []struct {
		name string
		db   *sql.DB
		cfg  *txn.Config
		says string
	}{
		{"no database", nil, operations, "must not be nil"},
		{"another driver", sql.OpenDB(&foreign{}), operations, "its driver is *txnsql_test.foreign"},
		{"pgx, opened by itself", stdlib.OpenDB(*config()), operations, "txnsql.OpenDB"},
		{"pool without hooks", txnsql.OpenDBFromPool(unhooked), operations, "txn.ConfigurePool"},
		{"simple protocol (D7)", txnsql.OpenDB(simple), operations, "simple protocol"},
		{"no operation", s.db, nil, "Operations"},
	} {
		_, err := txnsql.New(c.db, c.cfg)
		var wrong *idempotency.ConfigError
		require.ErrorAs(t, err, &wrong, c.name)
		require.ErrorContains(t, err, c.says, c.name)
		if c.db != nil && c.db != s.db {
			require.NoError(t, c.db.Close())
		}
	}
	undeclared := request(t, idempotency.Operation{Name: "nobody.knows"}, "k", "body")
	_, err = s.place(t.Context(), undeclared)
	require.ErrorIs(t, err, idempotency.ErrConfig)
}

// Issue is one statement of the runner's own, on a connection of the sql.DB.
func TestRunner_IssuesTokens(t *testing.T) {
	t.Parallel()
	tokens, err := ids.NewTokens(&ids.TokensConfig{Keys: []ids.TokenKey{{ID: "a", Secret: bytes.Repeat([]byte("a"), 32)}}})
	require.NoError(t, err)
	ticket := idempotency.Operation{Name: "ticket.buy", RequireIssued: true, Tokens: tokens}
	s := newShop(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{create, ticket} })
	s.db.SetMaxOpenConns(1)
	token, err := txn.Issue(t.Context(), s.runner.Runner, idempotency.SingleTenant, ticket.Name)
	require.NoError(t, err)
	req := idempotency.Request{Key: token.Key, Fingerprint: idempotency.FingerprintBytes([]byte("body"))}
	res, err := s.place(t.Context(), req)
	require.NoError(t, err)
	s.requireOnce(t, req, res.Value)
	_, err = s.place(t.Context(), request(t, ticket, "made up", "body"))
	require.ErrorIs(t, err, idempotency.ErrNotIssued)
}

// What the program does to its configuration later is not the sql.DB's; and a sql.DB of a pool keeps no connection of it.
func TestOpenDB_LeavesConfigurationAndPoolAlone(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	config := s.direct.Config().ConnConfig
	config.RuntimeParams["application_name"] = "before"
	db := txnsql.OpenDB(config)
	defer func() { require.NoError(t, db.Close()) }()
	config.RuntimeParams["application_name"] = "after"
	var name string
	require.NoError(t, db.QueryRowContext(t.Context(), `SHOW application_name`).Scan(&name))
	require.Equal(t, "before", name)

	pool := s.direct.Config()
	txn.ConfigurePool(pool)
	pooled, err := pgxpool.NewWithConfig(t.Context(), pool)
	require.NoError(t, err)
	t.Cleanup(pooled.Close)
	ofPool := txnsql.OpenDBFromPool(pooled)
	t.Cleanup(func() { require.NoError(t, ofPool.Close()) }) // before the pool, which waits for its connections
	require.NoError(t, ofPool.PingContext(t.Context()))
	require.Zero(t, ofPool.Stats().Idle)
	require.Zero(t, pooled.Stat().AcquiredConns())
}
