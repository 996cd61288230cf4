package idempotencyconnect_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc/idempotencyconnect"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// placeOrder is a handler as the generated code wants it.
func placeOrder(ctx context.Context, req *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.Int64Value], error) {
	tx, _ := txn.FromContext(ctx)
	var id int64
	err := tx.QueryRow(ctx, `INSERT INTO orders (sku) VALUES ($1) RETURNING id`, req.Msg.Value).Scan(&id)
	if err != nil {
		return nil, err // rolled back, and not recorded
	}
	return connect.NewResponse(wrapperspb.Int64(id)), nil // sent after COMMIT
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

	const method = "/shop.Orders/Create"
	once, err := idempotencyconnect.New(runner, idempotencyconnect.SingleTenant, map[string]string{method: create.Name}, nil)
	must(err)
	mux := http.NewServeMux()
	mux.Handle(method, connect.NewUnaryHandler(method, placeOrder, connect.WithInterceptors(once)))
	server := httptest.NewServer(mux)
	defer server.Close()

	client := connect.NewClient[wrapperspb.StringValue, wrapperspb.Int64Value](server.Client(), server.URL+method,
		connect.WithInterceptors(idempotencyconnect.Client([]string{method}, idempotencyconnect.Retry{})))
	for range 2 { // a double click
		req := connect.NewRequest(wrapperspb.String("tea"))
		req.Header().Set(idempotencyconnect.HeaderKey, "0197-click")
		resp, err := client.CallUnary(ctx, req)
		must(err)
		fmt.Println("order", resp.Msg.Value, "replayed:", idempotencyconnect.Replayed(resp.Header()))
	}
	// Output:
	// order 1 replayed: false
	// order 1 replayed: true
}
