package idempotencyhttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create"}

// site is a database with an orders table, and servers on it.
type site struct {
	pool   *pgxpool.Pool
	runner *txn.Runner
	client *http.Client
	log    *logBuffer
	url    string // of the server of serve
}

// newSite makes a database and a runner.
func newSite(t testing.TB, o ...func(*txn.Config)) *site {
	t.Helper()
	return newSiteWith(t, func(*pgxpool.Config) {}, o...)
}

func newSiteWith(t testing.TB, configure func(*pgxpool.Config), o ...func(*txn.Config)) *site {
	t.Helper()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) {
		c.MaxConns = max(c.MaxConns, 8)
		configure(c)
		txn.ConfigurePool(c)
	})
	// No unique key but its own: only the library stands between a duplicate and a second row.
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, note text)`)
	require.NoError(t, err)
	cfg := &txn.Config{Operations: []idempotency.Operation{create}}
	for _, change := range o {
		change(cfg)
	}
	runner, err := txn.New(pool, cfg)
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	return &site{pool: pool, runner: runner, client: &http.Client{Transport: &http.Transport{}}, log: &logBuffer{}}
}

// another is the same database and runner, for servers and a client of its own.
func (s *site) another() *site {
	return &site{pool: s.pool, runner: s.runner, client: &http.Client{Transport: &http.Transport{}}, log: &logBuffer{}, url: s.url}
}

// middleware makes one of the site's runner, which logs into the site's log.
func (s *site) middleware(t testing.TB, cfg ...func(*idempotencyhttp.Config)) *idempotencyhttp.Middleware {
	t.Helper()
	config := idempotencyhttp.Config{Log: logTo(s.log)}
	for _, change := range cfg {
		change(&config)
	}
	once, err := idempotencyhttp.New(s.runner, idempotencyhttp.SingleTenant, &config)
	require.NoError(t, err)
	return once
}

// open serves a handler as it is.
func (s *site) open(t testing.TB, h http.Handler) {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // panics are part of the tests
	server.Start()
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		server.Close()
		// A connection that was broken off is closed in the background.
		require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 30*time.Second, 5*time.Millisecond, "not given back to the pool")
	})
	s.url = server.URL
}

// serve protects a handler and serves it.
func (s *site) serve(t testing.TB, h http.HandlerFunc, cfg ...func(*idempotencyhttp.Config)) *site {
	t.Helper()
	s.open(t, s.middleware(t, cfg...).Operation(create.Name)(h))
	return s
}

// answer is what a client got.
type answer struct {
	status  int
	header  http.Header
	trailer http.Header
	body    string
}

func (a answer) replayed() bool { return a.header.Get(idempotencyhttp.HeaderReplayed) == "true" }

// post sends a request with a key and a body.
func (s *site) post(t testing.TB, key, body string) answer {
	t.Helper()
	return s.send(t, http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {key}}, strings.NewReader(body))
}

// send sends a request. Of every success with a key it demands that a committed record be there.
func (s *site) send(t testing.TB, method, path string, h http.Header, body io.Reader) answer {
	t.Helper()
	a, err := s.try(t.Context(), method, path, h, body)
	require.NoError(t, err)
	return a
}

// try is send for other goroutines than the test's.
func (s *site) try(ctx context.Context, method, path string, h http.Header, body io.Reader) (a answer, err error) {
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	if err != nil {
		return a, err
	}
	for name, values := range h {
		req.Header[name] = values
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	a = answer{resp.StatusCode, resp.Header, resp.Trailer, string(text)}
	if key, err := idempotencyhttp.KeyValue(h, false); err == nil && a.status < 300 && method == http.MethodPost {
		state, err := s.state(ctx, key)
		if err != nil || state != "SUCCESS" {
			return a, fmt.Errorf("answered %d, and the record is %q: %w", a.status, state, err)
		}
	}
	return a, nil
}

// state is that of a key's record; empty: there is none.
func (s *site) state(ctx context.Context, key string) (state string, err error) {
	err = s.pool.QueryRow(ctx, `SELECT coalesce((SELECT max(state) FROM idempotency.records WHERE key = $1), '')`, key).Scan(&state)
	return state, err
}

func (s *site) requireState(t testing.TB, key, want string) {
	t.Helper()
	state, err := s.state(context.WithoutCancel(t.Context()), key)
	require.NoError(t, err)
	require.Equal(t, want, state)
}

func (s *site) orders(t testing.TB, key string) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM orders WHERE key = $1`, key).Scan(&n))
	return n
}

// insert writes an order by the request's key, in the transaction of its context.
func insert(r *http.Request) (id int64, err error) {
	tx, ok := txn.FromContext(r.Context())
	if !ok {
		return 0, errors.New("no transaction")
	}
	key, err := idempotencyhttp.KeyValue(r.Header, false)
	if err != nil {
		return 0, err
	}
	err = tx.QueryRow(r.Context(), `INSERT INTO orders (key) VALUES ($1) RETURNING id`, key).Scan(&id)
	return id, err
}

// place is the handler of most tests: it takes an order.
func place(w http.ResponseWriter, r *http.Request) {
	id, err := insert(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Location", fmt.Sprintf("/orders/%d", id))
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, `{"id":%d}`, id)
}

// requireProblem checks a problem of ours.
func requireProblem(t testing.TB, a answer, status int, name string) (p idempotencyhttp.Problem) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	require.NoError(t, json.Unmarshal([]byte(a.body), &p))
	require.Equal(t, idempotencyhttp.TypeBase+name, p.Type)
	require.Equal(t, status, p.Status)
	require.NotEmpty(t, p.Title)
	require.False(t, a.replayed())
	return p
}

// count counts how often a handler is entered.
type count struct {
	mu sync.Mutex
	n  int
}

func (c *count) add() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return c.n
}

func (c *count) get() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func logTo(log *logBuffer) *slog.Logger { return slog.New(slog.NewTextHandler(log, nil)) }

// logBuffer is a log that a server writes and a test reads.
type logBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.String()
}

// sqlError makes an SQL statement of the request's transaction fail with a code.
func sqlError(r *http.Request, code string) error {
	tx, _ := txn.FromContext(r.Context())
	_, err := tx.Exec(r.Context(), fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '%s'; END $$`, code))
	return err
}
