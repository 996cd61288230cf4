package idempotencyclient_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
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
	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create", Wait: idempotency.NoWait}

// service takes orders on a real PostgreSQL, behind the middleware.
type service struct {
	pool *pgxpool.Pool
	http.Handler
	enter func() // at the beginning of the handler
}

func newService(t *testing.T, cfg *idempotencyhttp.Config) *service {
	t.Helper()
	s := &service{pool: pgtest.Pool(t, txn.ConfigurePool), enter: func() {}}
	_, err := s.pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL)`)
	require.NoError(t, err)
	runner, err := txn.New(s.pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	once, err := idempotencyhttp.New(runner, idempotencyhttp.SingleTenant, cfg)
	require.NoError(t, err)
	s.Handler = once.Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.enter()
		note, _ := io.ReadAll(r.Body) // of memory
		tx, _ := txn.FromContext(r.Context())
		var id int64
		if err := tx.QueryRow(r.Context(), `INSERT INTO orders (note) VALUES ($1) RETURNING id`, string(note)).Scan(&id); err != nil {
			http.Error(w, "no order today", http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprintf(w, "order %d", id)
	}))
	return s
}

func (s *service) orders(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM orders`).Scan(&n))
	return n
}

// seen are the keys of the requests that have come, in their order.
type seen struct {
	mu   sync.Mutex
	keys []string
}

// add returns which one it is, from 1.
func (s *seen) add(r *http.Request) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys = append(s.keys, r.Header.Get(idempotencyclient.HeaderKey))
	return len(s.keys)
}

func (s *seen) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.keys...)
}

// serve serves handle, which is told the request's number, and returns the requests' keys.
func serve(t *testing.T, handle func(n int, w http.ResponseWriter, r *http.Request)) (url string, keys *seen) {
	t.Helper()
	keys = &seen{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handle(keys.add(r), w, r) }))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	t.Cleanup(server.Close)
	return server.URL, keys
}

// lose runs a handler to its end, COMMIT included, and closes the connection instead of answering.
func lose(w http.ResponseWriter, r *http.Request, next http.Handler) {
	next.ServeHTTP(httptest.NewRecorder(), r)
	hangUp(w)
}

func hangUp(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err == nil {
		_ = conn.Close()
	}
}

// newClient makes one that pauses for a moment only.
func newClient(t *testing.T, change ...func(*idempotencyclient.Config)) *http.Client {
	t.Helper()
	cfg := &idempotencyclient.Config{Pause: time.Millisecond}
	for _, c := range change {
		c(cfg)
	}
	base := &http.Transport{DialContext: (&net.Dialer{}).DialContext}
	t.Cleanup(base.CloseIdleConnections)
	transport, err := idempotencyclient.New(base, cfg)
	require.NoError(t, err)
	return &http.Client{Transport: transport}
}

func post(ctx context.Context, t *testing.T, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	return req
}

// text reads an answer.
func text(t *testing.T, resp *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(body)
}
