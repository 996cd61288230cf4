package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	redis.SetLogger(silent{}) // as main does
	if order := os.Getenv(envPayer); order != "" {
		if err := payAndDie(context.Background(), order); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			os.Exit(exitFailed)
		}
		os.Exit(exitOK)
	}
	pgtest.Main(m)
}

// shop is a service with a database of its own, open for HTTP.
type shop struct {
	pool      *pgxpool.Pool // the test's own
	instances []*instance
	http      *http.Client
	gateway   *servedGateway
	log       *bytes.Buffer // read it after the instances were closed
}

// shopOptions are one instance of the service in STRICT, if nothing is said.
type shopOptions struct {
	instances int
	redis     *redisServer
	unsafe    bool
	think     func(string) time.Duration
}

// newShop opens one. think is how long it takes over the order of a key.
func newShop(t *testing.T, unsafe bool, think func(string) time.Duration) *shop {
	t.Helper()
	return openShop(t, shopOptions{unsafe: unsafe, think: think})
}

func openShop(t *testing.T, o shopOptions) *shop {
	t.Helper()
	s := &shop{pool: pgtest.Pool(t), http: &http.Client{Transport: &http.Transport{}}, log: &bytes.Buffer{}}
	require.NoError(t, createSchema(t.Context(), s.pool))
	gateway, stop, err := openGateway(t.Context(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(stop)
	s.gateway = gateway
	cfg := instanceConfig{
		database: s.pool.Config().ConnString(), conns: 8, redis: o.redis, gateway: gateway.base, unsafe: o.unsafe, think: o.think,
		log: slog.New(slog.NewTextHandler(s.log, nil)),
	}
	t.Cleanup(func() {
		s.http.CloseIdleConnections()
		s.close()
		for _, i := range s.instances {
			require.Zero(t, i.pool.Stat().AcquiredConns(), "not given back to the pool")
		}
	})
	for range max(o.instances, 1) {
		i, err := openInstance(t.Context(), cfg, nil)
		require.NoError(t, err)
		s.instances = append(s.instances, i)
		listener, err := listen(t.Context(), "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, i.serve(t.Context(), listener))
	}
	return s
}

func (s *shop) close() { closeAll(s.instances) }

// startRedis starts a Redis for one test.
func startRedis(t *testing.T) (*redisServer, *devstack.RedisNode) {
	t.Helper()
	node, stop, err := startRedisNode(t.Context(), &devstack.Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, stop()) })
	server, err := newRedisServer(node.URL(), "test")
	require.NoError(t, err)
	return server, node
}

func noThinking(string) time.Duration { return 0 }

// answer is what a client got.
type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) by() string { return a.header.Get(headerAnsweredBy) }

func (a answer) replayed() bool { return a.header.Get(idempotencyhttp.HeaderReplayed) == "true" }

func (s *shop) do(t *testing.T, method, path string, header http.Header, body io.Reader) answer {
	t.Helper()
	a, err := s.try(t.Context(), method, path, header, body)
	require.NoError(t, err)
	return a
}

// try is do for other goroutines than the test's.
func (s *shop) try(ctx context.Context, method, path string, header http.Header, body io.Reader) (answer, error) {
	return s.tryAt(ctx, 0, method, path, header, body)
}

// tryAt asks one of the instances.
func (s *shop) tryAt(ctx context.Context, instance int, method, path string, header http.Header, body io.Reader) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.instances[instance].base.String()+path, body)
	if err != nil {
		return answer{}, err
	}
	req.Header = header
	resp, err := s.http.Do(req)
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

func keyHeader(key string) http.Header { return http.Header{idempotencyhttp.HeaderKey: {key}} }

func (s *shop) postAt(t *testing.T, instance int, key, body string) answer {
	t.Helper()
	a, err := s.tryAt(t.Context(), instance, http.MethodPost, "/orders", keyHeader(key), strings.NewReader(body))
	require.NoError(t, err)
	return a
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

// typeOf is the type of a problem with this name, of which the shop has some of its own.
func typeOf(name string) string {
	switch strings.ReplaceAll(name, "-", "_") {
	case codeOutOfStock, codeUnknownSKU, codeCouponUsed, codeUnknownCoupon, codeCardRefused, codeNotCharged, codeNotPayable,
		"not_found", "method_not_allowed", "transition_refused", "gateway":
		return shopTypeBase + name
	}
	return idempotencyhttp.TypeBase + name
}

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
	require.Equal(t, typeOf(name), p.Type)
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
	require.Contains(t, stderr.String(), "killed before it knows: charges 1, record PROCESSING, order created")
	require.Contains(t, stderr.String(), "asked the gateway: charges 1, record SUCCESS, order paid")
}

func TestRun_UnsafeSaysWhatItsStatusMeans(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), []string{"-once", "-unsafe", "-addr", "127.0.0.1:0", "-keys", "5"}, &stdout, &stderr)
	require.Equal(t, exitFailed, status, stderr.String())
	require.Contains(t, stdout.String(), "A status of 1\nis the point of it.")
	require.Empty(t, stderr.String())
}

func TestRun_StrictHasNoRedis(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	args := []string{"-strict", "-once", "-json", "-addr", "127.0.0.1:0", "-instances", "2", "-keys", "5", "-requests", "50"}
	require.Equal(t, exitOK, run(t.Context(), args, &stdout, &stderr), stderr.String())
	require.NotContains(t, stderr.String(), "Redis:")
	var r report
	require.NoError(t, json.Unmarshal(stdout.Bytes(), &r))
	require.Zero(t, r.ByRedis)
	require.Equal(t, r.Merged, r.ByLocal, "there is no local front, but there are concurrent calls")
	require.Positive(t, r.ByPostgreSQL)
}

// Not parallel: it clears the environment.
func TestRun_RedisKilledInMidStormHarmsNobody(t *testing.T) {
	t.Setenv(envRedis, "")
	var stdout, stderr bytes.Buffer
	args := []string{"-kill-redis", "-once", "-json", "-addr", "127.0.0.1:0", "-instances", "2", "-keys", "40"}
	require.Equal(t, exitOK, run(t.Context(), args, &stdout, &stderr), stderr.String())
	var r report
	require.NoError(t, json.Unmarshal(stdout.Bytes(), &r))
	require.EqualValues(t, 400, r.Requests)
	require.EqualValues(t, 40, r.Orders)
	require.Zero(t, r.Duplicates)
	require.Zero(t, r.Lost)
	require.Zero(t, r.Errors)
	rest := stderr.String()
	for _, line := range []string{"Redis was killed.\n", " goes on without Redis: ", "Redis was started again, after ", " has Redis again.\n"} {
		_, after, found := strings.Cut(rest, line)
		require.True(t, found, "no %q, in this order, in %s", line, stderr.String())
		rest = after
	}
}

// Not parallel: it changes the environment.
func TestRun_SomebodyElsesRedisIsNotKilled(t *testing.T) {
	t.Setenv(envRedis, "redis://127.0.0.1:1/0")
	var out bytes.Buffer
	require.Equal(t, exitUsage, run(t.Context(), []string{"-kill-redis"}, &out, &out))
	require.Contains(t, out.String(), "unset "+envRedis)
}

// Not parallel: it changes the environment.
func TestRun_WithoutRedisItSaysWhatToDo(t *testing.T) {
	database := pgtest.EmptyURL(t) // before the test's own server is forbidden
	t.Setenv("PGONCE_STACK", devstack.ProviderEnv)
	t.Setenv("PGONCE_DATABASE_URL", database)
	t.Setenv(envRedis, "")
	var out bytes.Buffer
	require.Equal(t, exitFailed, run(t.Context(), []string{"-once", "-addr", "127.0.0.1:0"}, &out, &out))
	require.Contains(t, out.String(), envRedis+" is not set")
	require.Contains(t, out.String(), "Without a Redis: demo -strict")
}

func TestRun_ChaosIsRepairedInOnePass(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	args := []string{"-chaos", "-once", "-addr", "127.0.0.1:0", "-keys", "60", "-requests", "200"}
	require.Equal(t, exitOK, run(t.Context(), args, &out, &out), out.String())
	for _, line := range []string{
		`payments nobody works on +20  0`, `rolled back +20  0`, `nobody runs it +20  0`, `are paid: 10 of 10; charges: 10`,
		// Of the storm's own outcomes, a few of which may not have got to Redis in time.
		`not in Redis +[1-9]\d*  0`, `forged outcomes in Redis +[1-9]\d*  0`, `stay for ever +[1-9]\d*  0`,
	} {
		require.Regexp(t, line, out.String())
	}
}

func TestParseOptions_RefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-kill-redis", "-strict"},
		{"-chaos", "-strict"},
		{"-kill-redis", "-unsafe"},
		{"-instances", "0"},
		{"-instances", "11"},
		{"-keys", "0"},
		{"word"},
		{"-serve", "-once"},
		{"-allow-origin", "localhost"},
		{"-allow-origin", "http://localhost:3000/"},
		{"-allow-origin", "*"},
	} {
		var out bytes.Buffer
		_, err := parseOptions(args, &out)
		require.Error(t, err, args)
		require.Contains(t, out.String(), "demo -help tells more")
	}
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
