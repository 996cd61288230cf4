package idempotencyconnect_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc/idempotencyconnect"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create"}

const (
	createMethod = "/shop.Orders/Create"
	listMethod   = "/shop.Orders/List"
	watchMethod  = "/shop.Orders/Watch"
)

type (
	request  = connect.Request[wrapperspb.StringValue]
	response = connect.Response[wrapperspb.Int64Value]
	handler  = func(context.Context, *request) (*response, error)
)

// wire is a protocol of Connect over a version of HTTP.
type wire struct {
	http2   bool
	options []connect.ClientOption
}

var wires = map[string]wire{
	"connect, HTTP/1.1":       {false, nil},
	"connect, HTTP/2":         {true, nil},
	"connect JSON, HTTP/1.1":  {false, []connect.ClientOption{connect.WithProtoJSON()}},
	"gRPC, HTTP/2":            {true, []connect.ClientOption{connect.WithGRPC()}},
	"gRPC-Web, HTTP/1.1":      {false, []connect.ClientOption{connect.WithGRPCWeb()}},
	"gRPC-Web JSON, HTTP/1.1": {false, []connect.ClientOption{connect.WithGRPCWeb(), connect.WithProtoJSON()}},
}

// service is one on a database of its own, on a port of this machine.
type service struct {
	pool   *pgxpool.Pool
	runner *txn.Runner
	once   *idempotencyconnect.Interceptor
	url    string
	log    *lockedBuffer
}

type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// start starts one. around, if any, is between the network and the handlers.
func start(t *testing.T, h handler, cfg *idempotencyconnect.Config, around ...func(http.Handler) http.Handler) *service {
	t.Helper()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) {
		c.MaxConns = 8
		txn.ConfigurePool(c)
	})
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL)`)
	require.NoError(t, err)
	s := &service{pool: pool, log: &lockedBuffer{}}
	s.runner, err = txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create, {Name: "order.impatient", Wait: idempotency.NoWait}}})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	if cfg == nil {
		cfg = &idempotencyconnect.Config{}
	}
	cfg.Log = slog.New(slog.NewTextHandler(s.log, nil))
	s.once, err = idempotencyconnect.New(s.runner, idempotencyconnect.SingleTenant, map[string]string{createMethod: "order.impatient", watchMethod: create.Name}, cfg)
	require.NoError(t, err)

	mux := http.NewServeMux()
	protect := connect.WithInterceptors(s.once)
	mux.Handle(createMethod, connect.NewUnaryHandler(createMethod, h, protect))
	mux.Handle(listMethod, connect.NewUnaryHandler(listMethod, h, protect))
	mux.Handle(watchMethod, connect.NewServerStreamHandler(watchMethod,
		func(context.Context, *request, *connect.ServerStream[wrapperspb.Int64Value]) error { return nil }, protect))
	var served http.Handler = mux
	for _, f := range around {
		served = f(served)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.url = "http://" + listener.Addr().String()
	server := &http.Server{Handler: served, Protocols: protocols(true, true), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	return s
}

func protocols(http1, http2 bool) *http.Protocols {
	p := &http.Protocols{}
	p.SetHTTP1(http1)
	p.SetUnencryptedHTTP2(http2)
	return p
}

// transport keeps the bodies of the answers, and the keys of the requests.
type transport struct {
	*http.Transport
	mu     sync.Mutex
	bodies []*bytes.Buffer
	keys   []string
	protos []string
}

func (r *transport) Do(req *http.Request) (*http.Response, error) {
	r.mu.Lock()
	r.keys = append(r.keys, req.Header.Get(idempotencyconnect.HeaderKey))
	r.mu.Unlock()
	resp, err := r.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	body := &bytes.Buffer{}
	r.bodies, r.protos = append(r.bodies, body), append(r.protos, resp.Proto)
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.TeeReader(resp.Body, body), resp.Body}
	return resp, nil
}

// client is one of a method.
func (s *service) client(t *testing.T, w wire, method string, options ...connect.ClientOption) (*connect.Client[wrapperspb.StringValue, wrapperspb.Int64Value], *transport) {
	t.Helper()
	r := &transport{Transport: &http.Transport{Protocols: protocols(!w.http2, w.http2)}}
	t.Cleanup(r.CloseIdleConnections)
	return connect.NewClient[wrapperspb.StringValue, wrapperspb.Int64Value](r, s.url+method, append(options, w.options...)...), r
}

// order makes a request for one; no key: none is sent.
func order(key, text string) *request {
	req := connect.NewRequest(wrapperspb.String(text))
	if key != "" {
		req.Header().Set(idempotencyconnect.HeaderKey, key)
	}
	return req
}

// place is a handler that takes orders.
func place(ctx context.Context, req *request) (*response, error) {
	tx, inside := txn.FromContext(ctx)
	if !inside {
		return nil, errors.New("no transaction")
	}
	var id int64
	if err := tx.QueryRow(ctx, `INSERT INTO orders (note) VALUES ($1) RETURNING id`, req.Msg.Value).Scan(&id); err != nil {
		return nil, err
	}
	req.Msg.Value = "changed by the handler"
	return connect.NewResponse(wrapperspb.Int64(id)), nil
}

func (s *service) orders(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM orders`).Scan(&n))
	return n
}
