package idempotencygrpc_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create", Wait: 30 * time.Second} // on a slow machine too

const (
	createMethod = "/shop.Orders/Create"
	listMethod   = "/shop.Orders/List"
	watchMethod  = "/shop.Orders/Watch"
)

// handler takes an order by its text.
type handler func(ctx context.Context, text string) (int64, error)

// server is a service on a database of its own.
type server struct {
	pool    *pgxpool.Pool
	runner  *txn.Runner
	conn    *grpc.ClientConn
	log     *lockedBuffer
	handler handler
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

func unary(name string) grpc.MethodDesc {
	return grpc.MethodDesc{MethodName: name, Handler: func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		info := &grpc.UnaryServerInfo{Server: srv, FullMethod: "/shop.Orders/" + name}
		return interceptor(ctx, in, info, func(ctx context.Context, req any) (any, error) {
			text := req.(*wrapperspb.StringValue)
			id, err := srv.(*server).handler(ctx, text.Value)
			text.Value = "changed by the handler"
			return wrapperspb.Int64(id), err
		})
	}}
}

var description = grpc.ServiceDesc{
	ServiceName: "shop.Orders", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{unary("Create"), unary("List")},
	Streams: []grpc.StreamDesc{{StreamName: "Watch", ServerStreams: true, Handler: func(any, grpc.ServerStream) error { return nil }}},
}

func start(t *testing.T, h handler, change ...func(*idempotencygrpc.Config)) *server {
	t.Helper()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) {
		c.MaxConns = 8
		txn.ConfigurePool(c)
	})
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL)`)
	require.NoError(t, err)
	s := &server{pool: pool, handler: h, log: &lockedBuffer{}}
	s.runner, err = txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create, {Name: "order.impatient", Wait: idempotency.NoWait}}})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	cfg := &idempotencygrpc.Config{Log: slog.New(slog.NewTextHandler(s.log, nil))}
	for _, f := range change {
		f(cfg)
	}
	i, err := idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, map[string]string{createMethod: create.Name, watchMethod: create.Name}, cfg)
	require.NoError(t, err)
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer(grpc.ChainUnaryInterceptor(i.Unary()), grpc.ChainStreamInterceptor(i.Stream()))
	g.RegisterService(&description, s)
	go func() { _ = g.Serve(listener) }()
	t.Cleanup(g.Stop)
	s.conn, err = grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if i, is := ctx.Value(clientKey{}).(grpc.UnaryClientInterceptor); is {
				return i(ctx, method, req, reply, cc, invoke, opts...)
			}
			return invoke(ctx, method, req, reply, cc, opts...)
		}))
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.conn.Close() })
	return s
}

// clientKey is where a test leaves a client's interceptor.
type clientKey struct{}

// order asks for an order; no key: none is sent.
func (s *server) order(ctx context.Context, method, key, text string) (id int64, replayed bool, err error) {
	if key != "" {
		ctx = idempotencygrpc.WithKey(ctx, key)
	}
	var header metadata.MD
	reply := new(wrapperspb.Int64Value)
	err = s.conn.Invoke(ctx, method, wrapperspb.String(text), reply, grpc.Header(&header))
	return reply.Value, idempotencygrpc.Replayed(header), err
}

// place is a handler that takes orders.
func place(ctx context.Context, text string) (id int64, err error) {
	tx, inside := txn.FromContext(ctx)
	if !inside {
		return 0, errors.New("no transaction")
	}
	err = tx.QueryRow(ctx, `INSERT INTO orders (note) VALUES ($1) RETURNING id`, text).Scan(&id)
	return id, err
}

func (s *server) orders(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM orders`).Scan(&n))
	return n
}
