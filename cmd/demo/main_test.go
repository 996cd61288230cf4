package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// shop is a service with a database of its own, open for HTTP.
type shop struct {
	pool   *pgxpool.Pool
	server *httptest.Server
	log    *bytes.Buffer // read it after the server was closed
}

// newShop opens one. think is how long it takes over the order of a key.
func newShop(t *testing.T, unsafe bool, think func(string) time.Duration) *shop {
	t.Helper()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) {
		c.MaxConns = 8
		txn.ConfigurePool(c)
	})
	require.NoError(t, createSchema(t.Context(), pool))
	s := &shop{pool: pool, log: &bytes.Buffer{}}
	svc, err := newService(pool, unsafe, think, slog.New(slog.NewTextHandler(s.log, nil)))
	require.NoError(t, err)
	s.server = httptest.NewServer(svc.handler())
	t.Cleanup(s.server.Close)
	return s
}

func noThinking(string) time.Duration { return 0 }

// answer is what a client got.
type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) replayed() bool { return a.header.Get(headerReplayed) == "true" }

func (s *shop) do(t *testing.T, method, path string, header http.Header, body io.Reader) answer {
	t.Helper()
	a, err := s.try(t.Context(), method, path, header, body)
	require.NoError(t, err)
	return a
}

// try is do for other goroutines than the test's.
func (s *shop) try(ctx context.Context, method, path string, header http.Header, body io.Reader) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.server.URL+path, body)
	if err != nil {
		return answer{}, err
	}
	req.Header = header
	resp, err := s.server.Client().Do(req)
	if err != nil {
		return answer{}, err
	}
	text, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return answer{resp.StatusCode, resp.Header, string(text)}, err
}

func (s *shop) post(t *testing.T, key, body string) answer {
	t.Helper()
	return s.do(t, http.MethodPost, "/orders", keyHeader(key), strings.NewReader(body))
}

func (s *shop) get(t *testing.T, path string) answer {
	t.Helper()
	return s.do(t, http.MethodGet, path, http.Header{}, nil)
}

func keyHeader(key string) http.Header { return http.Header{headerKey: {key}} }

func (s *shop) base(t *testing.T) *url.URL {
	t.Helper()
	base, err := url.Parse(s.server.URL)
	require.NoError(t, err)
	return base
}

// number is the answer to a query for one number.
func (s *shop) number(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

func (s *shop) orders(t *testing.T, key string) int {
	t.Helper()
	return s.number(t, `SELECT count(*) FROM demo.orders WHERE idempotency_key = $1`, key)
}

// eventually waits until a query counts n.
func (s *shop) eventually(t *testing.T, n int, sql string, args ...any) {
	t.Helper()
	require.Eventually(t, func() bool { return s.number(t, sql, args...) == n }, 20*time.Second, 5*time.Millisecond, sql)
}

// thinking counts the orders over which the shop is thinking, in the middle of their transactions.
const thinking = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND state = 'active' AND query LIKE 'SELECT pg\_sleep%'`

// requireProblem checks the shape of a problem and returns it.
func requireProblem(t *testing.T, a answer, status int, name string) problem {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	var p problem
	decoder := json.NewDecoder(strings.NewReader(a.body))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&p))
	require.Equal(t, status, p.Status)
	require.Equal(t, problemType+name, p.Type)
	require.NotEmpty(t, p.Title)
	require.NotEmpty(t, p.Detail)
	return p
}

func TestRun_OnceWithJSONEndsWithTheObject(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), []string{"-once", "-json", "-addr", "127.0.0.1:0", "-keys", "5", "-requests", "50"}, &stdout, &stderr)
	require.Equal(t, exitOK, status, stderr.String())
	require.Equal(t, 1, strings.Count(stdout.String(), "\n"))
	var r report
	require.NoError(t, json.Unmarshal(stdout.Bytes(), &r))
	require.EqualValues(t, 50, r.Requests)
	require.EqualValues(t, 5, r.Orders)
	require.Contains(t, stderr.String(), "curl -i http://127.0.0.1:")
	require.Contains(t, stderr.String(), "psql ")
	require.Contains(t, stderr.String(), "Every one of the 5 keys has one order")
}

func TestRun_UnsafeSaysWhatItsStatusMeans(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), []string{"-once", "-unsafe", "-addr", "127.0.0.1:0", "-keys", "5"}, &stdout, &stderr)
	require.Equal(t, exitFailed, status, stderr.String())
	require.Contains(t, stdout.String(), "A status of 1\nis the point of it.")
	require.Empty(t, stderr.String())
}

func TestRun_InterruptedStopsAtOnce(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	require.Equal(t, exitInterrupted, run(ctx, nil, &out, &out))
	require.Contains(t, out.String(), "demo: interrupted\n")
}

func TestRun_ATakenAddressThatWasAskedForIsAnError(t *testing.T) {
	t.Parallel()
	taken := httptest.NewServer(nil)
	t.Cleanup(taken.Close)
	var out bytes.Buffer
	status := run(t.Context(), []string{"-addr", strings.TrimPrefix(taken.URL, "http://")}, &out, &out)
	require.Equal(t, exitFailed, status)
	require.Contains(t, out.String(), "choose another -addr")
}
