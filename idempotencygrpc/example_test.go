package idempotencygrpc_test

import (
	"context"
	"fmt"
	"net"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// orders is a service; its description is what generated code would have.
type orders struct{}

func (orders) Create(ctx context.Context, sku string) (int64, error) {
	tx, _ := txn.FromContext(ctx)
	var id int64
	err := tx.QueryRow(ctx, `INSERT INTO orders (sku) VALUES ($1) RETURNING id`, sku).Scan(&id)
	return id, err // an error: rolled back, and not recorded; else sent after COMMIT
}

var ordersDescription = grpc.ServiceDesc{
	ServiceName: "shop.Orders", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Create", Handler: func(
		srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor,
	) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		info := &grpc.UnaryServerInfo{Server: srv, FullMethod: createMethod}
		return interceptor(ctx, in, info, func(ctx context.Context, req any) (any, error) {
			id, err := srv.(orders).Create(ctx, req.(*wrapperspb.StringValue).Value)
			return wrapperspb.Int64(id), err
		})
	}}},
}

func Example() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx := context.Background()
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	config, err := pgxpool.ParseConfig(database)
	must(err)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	must(err)
	defer pool.Close()
	_, err = pool.Exec(ctx, `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, sku text)`)
	must(err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	must(err)

	methods := map[string]string{createMethod: create.Name}
	once, err := idempotencygrpc.New(runner, idempotencygrpc.SingleTenant, methods, nil)
	must(err)
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(once.Unary()))
	server.RegisterService(&ordersDescription, orders{})
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	must(err)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	client, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(idempotencygrpc.UnaryClient([]string{createMethod}, idempotencygrpc.Retry{})))
	must(err)
	defer func() { _ = client.Close() }()
	for range 2 { // a double click
		var header metadata.MD
		order := new(wrapperspb.Int64Value)
		keyed := idempotencygrpc.WithKey(ctx, "0197-click")
		must(client.Invoke(keyed, createMethod, wrapperspb.String("tea"), order, grpc.Header(&header)))
		fmt.Println("order", order.Value, "replayed:", idempotencygrpc.Replayed(header))
	}
	// Output:
	// order 1 replayed: false
	// order 1 replayed: true
}
