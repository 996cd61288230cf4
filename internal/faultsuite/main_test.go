package faultsuite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) {
	childtest.Main()
	pgtest.Main(m)
}

// scaled is how much of a suite one run does.
func scaled(usual, full int) int {
	if os.Getenv("PGONCE_FAULTS") == "full" {
		return full
	}
	return usual
}

var create = idempotency.Operation{Name: "order.create", Wait: 10 * time.Second}

type order struct {
	ID  int64  `json:"id"`
	Key string `json:"key"`
}

// awaitGone returns when no process is left that was killed: what it had sent is done before the server notices.
func awaitGone(t *testing.T, direct *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		var sessions int // a pooler keeps its own
		err := direct.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND application_name = 'shop' AND ($1 IS FALSE OR state IS DISTINCT FROM 'idle')`, pgtest.Env().Pooler).Scan(&sessions)
		return err == nil && sessions == 0
	}, 60*time.Second, 10*time.Millisecond)
}

// request is the request of a key.
func request(value string) (idempotency.Request, error) {
	key, err := create.Key(idempotency.SingleTenant, value)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(value))}, err
}

func insertOrder(ctx context.Context, tx pgx.Tx, key string) (o order, err error) {
	o.Key = key
	err = tx.QueryRow(ctx, `INSERT INTO orders (key) VALUES ($1) RETURNING id`, key).Scan(&o.ID)
	return o, err
}

// shop is an orders table behind a proxy, and a runner that knows only the proxy.
type shop struct {
	direct *pgxpool.Pool // past the proxy
	proxy  *pgproxy.Proxy
	pool   *pgxpool.Pool
	runner *txn.Runner
	events *events
	ledger
}

// options are how a shop differs from the usual one.
type options struct {
	mode   pgx.QueryExecMode
	proxy  *pgproxy.Config
	wait   time.Duration // of the operation
	idle   string        // idle_in_transaction_session_timeout
	config func(*txn.Config)
}

func newShop(t *testing.T, o options) *shop {
	t.Helper()
	return newShopOn(t, pgtest.Pool(t), o)
}

func newShopOn(t *testing.T, direct *pgxpool.Pool, o options) *shop {
	t.Helper()
	// No unique key but its own: only the library stands between a duplicate and a second row.
	const table = `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`
	s := &shop{direct: direct, events: &events{}}
	_, err := s.direct.Exec(t.Context(), table)
	require.NoError(t, err)
	url := pgtest.ServiceURL(t, s.direct.Config().ConnString())
	if o.idle != "" && pgtest.Env().Pooler { // which refuses it as a startup parameter
		_, err = s.direct.Exec(t.Context(), `ALTER DATABASE `+s.direct.Config().ConnConfig.Database+` SET idle_in_transaction_session_timeout = '`+o.idle+`'`)
		require.NoError(t, err)
		o.idle = ""
	}
	s.proxy, err = pgproxy.Start(t.Context(), url, o.proxy)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.proxy.Close()) })
	s.pool, err = connect(t.Context(), s.proxy.URL(url), o)
	require.NoError(t, err)
	t.Cleanup(s.pool.Close)
	cfg := &txn.Config{Operations: []idempotency.Operation{create}, OnEvent: s.events.add, Isolation: pgtest.Env().Isolation}
	if o.wait != 0 {
		cfg.Operations[0].Wait = o.wait
	}
	if o.config != nil {
		o.config(cfg)
	}
	s.runner, err = txn.New(s.pool, cfg)
	require.NoError(t, err)
	_, err = s.place(t.Context(), s.runner, "warm") // connects, prepares, checks the schema
	require.NoError(t, err)
	return s
}

func connect(ctx context.Context, url string, o options) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 8
	if o.mode != 0 { // else cache_statement
		cfg.ConnConfig.DefaultQueryExecMode = o.mode
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "shop"
	if o.idle != "" {
		cfg.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = o.idle
	}
	txn.ConfigurePool(cfg)
	return pgxpool.NewWithConfig(ctx, cfg)
}

// another is a runner of another process: past the proxy, and sharing nothing but the database.
func (s *shop) another(t *testing.T) *txn.Runner {
	t.Helper()
	return s.anotherAt(t, pgtest.ServiceURL(t, s.direct.Config().ConnString()))
}

func (s *shop) anotherAt(t *testing.T, url string) *txn.Runner {
	t.Helper()
	pool, err := connect(t.Context(), url, options{})
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	r, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	_, err = s.place(t.Context(), r, "warm") // checks the schema
	require.NoError(t, err)
	return r
}

// place places an order by key and writes down what the client was told.
func (s *shop) place(ctx context.Context, r *txn.Runner, key string) (txn.Result[order], error) {
	req, err := request(key)
	if err != nil {
		return txn.Result[order]{}, err
	}
	res, err := txn.WithIdempotency(ctx, r, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		return insertOrder(ctx, tx, key)
	})
	if told, known := verdict(key, res, err); known {
		s.tell(told)
	}
	return res, err
}

// placeUntilFree calls again while the key is in progress.
func (s *shop) placeUntilFree(t *testing.T, r *txn.Runner, key string) txn.Result[order] {
	t.Helper()
	for {
		res, err := s.place(t.Context(), r, key)
		if errors.Is(err, idempotency.ErrInProgress) {
			continue
		}
		require.NoError(t, err)
		return res
	}
}

// verdict is what a client learns from an answer. known is false for an error that no fault of these suites explains.
func verdict(key string, res txn.Result[order], err error) (told invariant.Told, known bool) {
	told = invariant.Told{Tenant: idempotency.SingleTenant, Key: key, Replayed: res.Replayed}
	switch {
	case err == nil:
		told.Outcome, told.Result = invariant.Succeeded, res.Record.Result
	case errors.Is(err, idempotency.ErrOutcomeUnknown): // before the others: it may wrap them
		told.Outcome = invariant.Unknown
	case errors.Is(err, idempotency.ErrFailed):
		told.Outcome, told.Result = invariant.Failed, res.Record.Result
	case errors.Is(err, idempotency.ErrInProgress), errors.Is(err, idempotency.ErrRestart), errors.Is(err, idempotency.ErrReadOnly),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		told.Outcome = invariant.NotDone
	default:
		return told, false
	}
	return told, true
}

// ledger is what all clients were told.
type ledger struct {
	mu   sync.Mutex
	told []invariant.Told
}

func (l *ledger) tell(told invariant.Told) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = append(l.told, told)
}

func (l *ledger) all() []invariant.Told {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]invariant.Told(nil), l.told...)
}

// tally is a suite's line.
type tally struct {
	mu                                   sync.Mutex
	cuts, resolved, kills                int
	slowest                              time.Duration
	keys, orders, duplicates, lost, more int
}

func (y *tally) String() string {
	return fmt.Sprintf("cuts %d, resolved %d, slowest %v, kills %d, keys %d, orders %d, duplicates %d, lost %d, other violations %d",
		y.cuts, y.resolved, y.slowest.Round(time.Millisecond), y.kills, y.keys, y.orders, y.duplicates, y.lost, y.more)
}

func (y *tally) add(change func()) {
	y.mu.Lock()
	defer y.mu.Unlock()
	change()
}

// check requires the invariants, with at least so many keys that succeeded, and counts.
func (s *shop) check(t *testing.T, y *tally, atLeast int, before *invariant.Snapshot) *invariant.Snapshot {
	t.Helper()
	check := invariant.Check{
		Orders: invariant.Orders{Table: "orders", KeyColumn: "key", Operation: create.Name, Tenant: idempotency.SingleTenant},
		Told:   s.all(), Before: before, AtLeast: atLeast,
	}
	report, err := check.Run(t.Context(), s.direct)
	require.NoError(t, err)
	y.add(func() {
		y.keys, y.orders = y.keys+report.Records, y.orders+report.Orders
		for _, v := range report.Violations {
			switch v.Invariant {
			case invariant.I1:
				y.duplicates++
			case invariant.I2:
				y.lost++ // told and not recorded so
			default:
				y.more++
			}
		}
	})
	require.NoError(t, report.Err())
	return report.After
}

// events keeps what a runner reports.
type events struct {
	mu   sync.Mutex
	all  []idempotency.Event
	hook func(idempotency.Event)
}

func (e *events) add(_ context.Context, event idempotency.Event) {
	e.mu.Lock()
	e.all = append(e.all, event)
	hook := e.hook
	e.mu.Unlock()
	if hook != nil {
		hook(event)
	}
}

func (e *events) on(hook func(idempotency.Event)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hook = hook
}

// take returns the events since the last take.
func (e *events) take() []idempotency.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	taken := e.all
	e.all = nil
	return taken
}

// only returns the one event of a type.
func only[E idempotency.Event](t *testing.T, all []idempotency.Event) (event E) {
	t.Helper()
	n := 0
	for _, e := range all {
		if found, ok := e.(E); ok {
			event = found
			n++
		}
	}
	require.Equal(t, 1, n, "events of type %T among %v", event, all)
	return event
}
