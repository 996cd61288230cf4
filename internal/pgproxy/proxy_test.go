package pgproxy

import (
	"context"
	"errors"
	"iter"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// bed is a database with an orders table, reached directly and through a proxy.
type bed struct {
	pool  *pgxpool.Pool
	proxy *Proxy
}

func newBed(t *testing.T, cfg *Config) *bed {
	t.Helper()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE orders (key text NOT NULL)")
	require.NoError(t, err)
	return newBedOn(t, pool, cfg)
}

func newBedOn(t *testing.T, pool *pgxpool.Pool, cfg *Config) *bed {
	t.Helper()
	proxy, err := Start(t.Context(), pool.Config().ConnString(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, proxy.Close()) })
	return &bed{pool: pool, proxy: proxy}
}

// recorder keeps what a client received.
type recorder struct {
	net.Conn
	mu    sync.Mutex
	got   []byte
	err   error
	wrote int // how often the client has sent something
}

func (r *recorder) Write(b []byte) (int, error) {
	n, err := r.Conn.Write(b)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wrote++
	return n, err
}

func (r *recorder) writes() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.wrote
}

func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = append(r.got, b[:n]...)
	if r.err == nil {
		r.err = err
	}
	return n, err
}

func (r *recorder) received() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return string(r.got)
}

// broken is the first error that reading has met.
func (r *recorder) broken() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *recorder) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = nil
}

// client is a connection through the proxy.
type client struct {
	*pgconn.PgConn
	recorder *recorder
	prepared bool
}

func (b *bed) connect(t *testing.T) *client {
	t.Helper()
	c, err := b.dial(t.Context(), b.proxy.URL(b.pool.Config().ConnString()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) }) // most are cut by then
	return c
}

func (b *bed) dial(ctx context.Context, url string) (*client, error) {
	cfg, err := pgconn.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	c := &client{}
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil || c.recorder != nil { // later ones are cancel requests
			return conn, err
		}
		c.recorder = &recorder{Conn: conn}
		return c.recorder, nil
	}
	c.PgConn, err = pgconn.ConnectConfig(ctx, cfg)
	return c, err
}

// answers is what a client was told about its insert and its COMMIT.
type answers struct {
	insert, commit error
	tag            string
}

// a protocol sends an insert and COMMIT.
type protocol struct {
	name string
	send func(ctx context.Context, c *client, key string) answers
}

const insertSQL = "INSERT INTO orders (key) VALUES ($1)"

var protocols = []protocol{
	{"simple", func(ctx context.Context, c *client, key string) (a answers) {
		_, a.insert = c.Exec(ctx, "INSERT INTO orders (key) VALUES ('"+key+"')").ReadAll()
		c.recorder.forget()
		results, err := c.Exec(ctx, "commit;").ReadAll()
		if a.commit = err; err == nil {
			a.tag = results[0].CommandTag.String()
		}
		return a
	}},
	// Insert, Sync, COMMIT, Sync in one flush, which is how this module commits.
	{"named", func(ctx context.Context, c *client, key string) answers {
		for name, sql := range map[string]string{"insert": insertSQL, "the_commit": "COMMIT"} {
			if c.prepared {
				break
			}
			if _, err := c.Prepare(ctx, name, sql, nil); err != nil {
				return answers{insert: err, commit: err}
			}
		}
		c.prepared = true
		return c.pipeline(ctx,
			func(p *pgconn.Pipeline) { p.SendQueryPrepared("insert", [][]byte{[]byte(key)}, nil, nil) },
			func(p *pgconn.Pipeline) { p.SendQueryPrepared("the_commit", nil, nil, nil) })
	}},
	{"unnamed", func(ctx context.Context, c *client, key string) answers {
		return c.pipeline(ctx,
			func(p *pgconn.Pipeline) { p.SendQueryParams(insertSQL, [][]byte{[]byte(key)}, nil, nil, nil) },
			func(p *pgconn.Pipeline) { p.SendQueryParams("COMMIT", nil, nil, nil, nil) })
	}},
}

func (c *client) pipeline(ctx context.Context, insert, commit func(*pgconn.Pipeline)) (a answers) {
	c.recorder.forget()
	p := c.StartPipeline(ctx)
	defer func() { _ = p.Close() }()
	insert(p)
	p.SendPipelineSync()
	commit(p)
	if err := p.Sync(); err != nil {
		return answers{insert: err, commit: err}
	}
	if _, a.insert = next(p); a.insert == nil {
		_, a.insert = p.GetResults() // its sync
	}
	if a.insert != nil {
		a.commit = a.insert
		return a
	}
	a.tag, a.commit = next(p)
	return a
}

func next(p *pgconn.Pipeline) (string, error) {
	results, err := p.GetResults()
	if err != nil {
		return "", err
	}
	reader, ok := results.(*pgconn.ResultReader)
	if !ok {
		return "", errors.New("not a result")
	}
	tag, err := reader.Close()
	return tag.String(), err
}

// order begins a transaction, and commits an order in it.
func (b *bed) order(t *testing.T, c *client, p protocol, key string) answers {
	t.Helper()
	_, err := c.Exec(t.Context(), "BEGIN").ReadAll()
	require.NoError(t, err)
	return p.send(t.Context(), c, key)
}

// requireLost: the client was told neither that it committed nor that it did not.
func requireLost(t *testing.T, a answers) {
	t.Helper()
	require.Error(t, a.commit)
	var told *pgconn.PgError
	require.False(t, errors.As(a.commit, &told), "%v", a.commit)
	require.Empty(t, a.tag)
}

func (b *bed) orders(t *testing.T, key string) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE key = $1", key).Scan(&n))
	return n
}

// backend returns the state of a server process, empty if it has ended.
func (b *bed) backend(t *testing.T, c *client) (state string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(),
		"SELECT COALESCE(max(state), '') FROM pg_stat_activity WHERE pid = $1", c.PID()).Scan(&state))
	return state
}

func (b *bed) requireBackend(t *testing.T, c *client, state string) {
	t.Helper()
	require.Eventually(t, func() bool { return b.backend(t, c) == state }, 10*time.Second, 5*time.Millisecond)
}

// round is a bed for one protocol.
type round struct {
	*bed
	c *client
	p protocol
}

// each gives a round for every protocol: an empty table, a new proxy and a connection through it.
func each(t *testing.T) iter.Seq[round] {
	t.Helper()
	pool := newBed(t, nil).pool
	return func(yield func(round) bool) {
		for _, p := range protocols {
			_, err := pool.Exec(t.Context(), "TRUNCATE orders")
			require.NoError(t, err)
			// pgx sends a cancel request when a connection breaks. It could meet what Release delivers.
			b := newBedOn(t, pool, &Config{SwallowCancels: true})
			if !tell(t, p, func() bool { return yield(round{b, b.connect(t), p}) }) {
				return
			}
		}
	}
}

// tell says in which protocol a test failed.
func tell(t *testing.T, p protocol, run func() bool) bool {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Log("with the protocol", p.name)
		}
	}()
	return run()
}

func TestRetarget_LeadsNewConnectionsElsewhere(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	other := newBedOn(t, b.pool, nil) // the same server by another door
	old := b.connect(t)
	require.NoError(t, b.proxy.Retarget(other.proxy.Addr()))
	require.Zero(t, other.proxy.Stats().Connections)
	b.connect(t)
	require.Equal(t, int64(1), other.proxy.Stats().Connections)
	_, err := old.Exec(t.Context(), "SELECT 1").ReadAll()
	require.NoError(t, err, "an old connection stays with its server")
	require.Error(t, b.proxy.Retarget("postgres://%"))
}
