package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/txn"
)

// createOrder is declared once: what a key of POST /orders is for. Wait is shorter than the shop's slowest orders, so
// that the storm shows what "in progress" looks like.
var createOrder = idempotency.Operation{Name: "order.create", Wait: 250 * time.Millisecond}

// checkout is for the shop's own pages, which come with a token in their form: it runs for issued tokens only. moveOrder is
// for whoever wants his PUT to be once per key too.
var (
	checkout  = idempotency.Operation{Name: "order.checkout", Wait: 250 * time.Millisecond, RequireIssued: true, Tokens: tokens()}
	moveOrder = idempotency.Operation{Name: "order.move"}
)

func tokens() *ids.Tokens {
	made, err := ids.NewTokens(nil)
	if err != nil {
		panic(err) // no configuration, nothing wrong with it
	}
	return made
}

// operations are all that the shop does once per key.
func operations(paying *payments) []idempotency.Operation {
	return []idempotency.Operation{createOrder, checkout, moveOrder, paying.operation()}
}

// maxBody is the largest request body.
const maxBody = 1 << 20

// service is the shop.
type service struct {
	pool     *pgxpool.Pool
	runner   *txn.Runner
	once     *idempotencyhttp.Middleware
	optional *idempotencyhttp.Middleware // the same for a route that is right without a key too
	payments *payments
	// unsafe takes orders in a plain transaction, as if the header were not there.
	unsafe bool
	// think is how long the shop takes over the order with this key.
	think func(key string) time.Duration
	log   *slog.Logger
}

// newPool opens a pool with this many connections, which count what they send. Nothing is connected yet.
func newPool(ctx context.Context, url string, conns int32, statements *atomic.Int64) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("parse database url: %w", err)
	}
	config.MaxConns = conns
	countStatements(&config.ConnConfig.Config, statements)
	txn.ConfigurePool(config)
	return pgxpool.NewWithConfig(ctx, config)
}

// newService makes a service. With fronts its strategy is HYBRID, without any STRICT.
func newService(
	pool *pgxpool.Pool, fronts []idempotency.Front, gateway *url.URL, unsafe bool, think func(string) time.Duration, log *slog.Logger,
) (*service, error) {
	paying := &payments{gateway: &gatewayClient{base: gateway}, pool: pool}
	runner, err := txn.New(pool, &txn.Config{
		Operations: operations(paying), Fronts: fronts, OnEvent: noteAnswered,
	})
	if err != nil {
		return nil, err
	}
	s := &service{pool: pool, runner: runner, payments: paying, unsafe: unsafe, think: think, log: log}
	cfg := idempotencyhttp.Config{
		MaxBody: maxBody, Log: log,
		Client: func(_ *http.Request, body []byte) string {
			in, err := parseOrder(body)
			if err != nil {
				return "" // whatever stands there may be no name
			}
			return in.Customer
		},
	}
	if s.once, err = idempotencyhttp.New(runner, idempotencyhttp.SingleTenant, &cfg); err != nil {
		return nil, err
	}
	cfg.Optional = true
	if s.optional, err = idempotencyhttp.New(runner, idempotencyhttp.SingleTenant, &cfg); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, handler := range s.routes() {
		mux.Handle(pattern, handler)
	}
	for path, allow := range allowed {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", allow)
			newProblem(http.StatusMethodNotAllowed, "method-not-allowed", "This is not done here.", "Use "+allow+".").Write(w)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		notFound("Try " + strings.Join(slices.Sorted(maps.Keys(s.routes())), ", ") + ".").Write(w)
	})
	return mux
}

// routes are all that is served. What changes something goes through the middleware.
func (s *service) routes() map[string]http.Handler {
	return map[string]http.Handler{
		"POST /orders":            s.takesOrders(createOrder),
		"POST /checkout":          s.takesOrders(checkout),
		"POST /checkout/tokens":   s.once.Tokens(checkout.Name),
		"POST /orders/{id}/pay":   tellAnswered(s.once.Leased(s.payments.operation().Name)(http.HandlerFunc(s.postPayment))),
		"PUT /orders/{id}/status": tellAnswered(s.optional.Operation(moveOrder.Name)(http.HandlerFunc(s.putStatus))),
		"GET /orders/{id}":        http.HandlerFunc(s.getOrder),
		"GET /stock/{sku}":        http.HandlerFunc(s.getStock),
		"GET /openapi.yaml":       http.HandlerFunc(getOpenAPI),
	}
}

// allowed are the methods of each path.
var allowed = map[string]string{
	"/orders": "POST", "/orders/{id}": "GET, HEAD", "/orders/{id}/status": "PUT", "/orders/{id}/pay": "POST",
	"/checkout": "POST", "/checkout/tokens": "POST", "/stock/{sku}": "GET, HEAD", "/openapi.yaml": "GET, HEAD",
}

// takesOrders takes an order once per key. With -unsafe the header is there for nothing.
func (s *service) takesOrders(op idempotency.Operation) http.Handler {
	post := http.HandlerFunc(s.postOrder)
	if s.unsafe {
		return post
	}
	return tellAnswered(s.once.Operation(op.Name)(post))
}

// postOrder takes an order, in the transaction of its key. It knows nothing of retries: what it answers is recorded with the
// order, a refusal too, and sent after COMMIT.
func (s *service) postOrder(w http.ResponseWriter, r *http.Request) {
	key, err := s.once.Key(r, createOrder)
	if err != nil {
		s.fail(w, r, key, err)
		return
	}
	in, err := readOrder(w, r)
	if err != nil {
		s.fail(w, r, key, err)
		return
	}
	placed, err := s.place(r.Context(), key.Value(), in)
	if err != nil {
		s.fail(w, r, key, err)
		return
	}
	w.Header().Set("Location", "/orders/"+strconv.FormatInt(placed.ID, 10))
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusCreated, placed)
}

func readOrder(w http.ResponseWriter, r *http.Request) (orderRequest, error) {
	body, err := readBody(w, r)
	if err != nil {
		return orderRequest{}, err
	}
	return parseOrder(body)
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if tooLarge := (*http.MaxBytesError)(nil); err != nil && !errors.As(err, &tooLarge) {
		err = invalid("body", "must arrive whole")
	}
	return body, err
}

// place is in the transaction that the middleware has begun. ctx is the request's: when the client hangs up, it is rolled back,
// record and all, unless its COMMIT is on the way already; a retry finds out which.
func (s *service) place(ctx context.Context, key string, in orderRequest) (placed *order, err error) {
	if tx, protected := txn.FromContext(ctx); protected {
		return placeOrder(ctx, tx, key, in, s.think(key))
	}
	// -unsafe
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		placed, err = placeOrder(ctx, tx, key, in, s.think(key))
		return err
	})
	return placed, err
}

func (s *service) getOrder(w http.ResponseWriter, r *http.Request) {
	found := &order{}
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		notFound("Order ids are numbers.").Write(w)
		return
	}
	err = s.pool.QueryRow(r.Context(), `
		SELECT id, customer, sku, quantity, coalesce(coupon, ''), status, created_at FROM demo.orders WHERE id = $1`, id).
		Scan(&found.ID, &found.Customer, &found.SKU, &found.Quantity, &found.Coupon, &found.Status, &found.CreatedAt)
	found.CreatedAt = found.CreatedAt.UTC()
	s.answer(w, r, found, err)
}

func (s *service) getStock(w http.ResponseWriter, r *http.Request) {
	var found struct {
		SKU      string `json:"sku"`
		Quantity int    `json:"quantity"`
	}
	sku := r.PathValue("sku")
	if validText("sku", sku, 1) != nil {
		notFound("That cannot be the name of anything we sell.").Write(w)
		return
	}
	err := s.pool.QueryRow(r.Context(), `SELECT sku, quantity FROM demo.stock WHERE sku = $1`, sku).
		Scan(&found.SKU, &found.Quantity)
	s.answer(w, r, found, err)
}

// answer answers a question for one row.
func (s *service) answer(w http.ResponseWriter, r *http.Request, found any, err error) {
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		notFound("There is no such row.").Write(w)
	case err != nil:
		s.fail(w, r, idempotency.Key{}, err)
	default:
		w.Header().Set("Content-Type", "application/json")
		writeJSON(w, http.StatusOK, found)
	}
}

// fail answers with a problem, and tells the operator of those that are ours.
func (s *service) fail(w http.ResponseWriter, r *http.Request, key idempotency.Key, err error) {
	if r.Context().Err() != nil {
		return // the client has hung up
	}
	p := problemOf(err)
	if p.Status >= http.StatusInternalServerError {
		s.log.ErrorContext(r.Context(), "request failed", slog.String("path", r.Pattern), slog.Any("key", key), slog.Any("error", err))
	}
	p.Write(w)
}
