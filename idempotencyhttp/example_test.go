package idempotencyhttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

var createOrder = idempotency.Operation{Name: "order.create"}

func newShop(runner *txn.Runner) (http.Handler, error) {
	once, err := idempotencyhttp.New(runner, customer, nil)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once.Operation(createOrder.Name)(http.HandlerFunc(postOrder)))
	return mux, nil
}

// customer says whose key it is: whoever the authentication before us has found, never what a client may choose.
func customer(r *http.Request) (string, error) { return authenticated(r.Context()) }

func postOrder(w http.ResponseWriter, r *http.Request) {
	tx, _ := txn.FromContext(r.Context())
	var id int64
	err := tx.QueryRow(r.Context(), `INSERT INTO orders (customer) VALUES ('c-7') RETURNING id`).Scan(&id)
	if err != nil {
		http.Error(w, "no order today", http.StatusInternalServerError) // rolled back, and not recorded
		return
	}
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, "order %d", id) // sent after COMMIT
}

type customerKey struct{}

// authenticate stands for what makes sure who calls.
func authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), customerKey{}, "c-7")))
	})
}

func authenticated(ctx context.Context) (string, error) {
	if id, ok := ctx.Value(customerKey{}).(string); ok {
		return id, nil
	}
	return "", errors.New("nobody has asked who this is")
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
	_, err = pool.Exec(ctx, `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, customer text)`)
	must(err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{createOrder}})
	must(err)
	shop, err := newShop(runner)
	must(err)

	for _, body := range []string{"tea", "tea", "coffee"} { // a double click, and a key that is used again
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/orders", strings.NewReader(body))
		r.Header.Set("Idempotency-Key", "0197-click")
		w := httptest.NewRecorder()
		authenticate(shop).ServeHTTP(w, r)
		fmt.Println(w.Code, w.Header().Get("Idempotent-Replayed"), strings.TrimSpace(w.Body.String()))
	}
	// Output:
	// 201  order 1
	// 201 true order 1
	// 422  {"type":"urn:pgonce:problem:mismatch","title":"This key was used for another request.","status":422,"detail":"A retry must be the same request as the first. For a new request use a new key."}
}
