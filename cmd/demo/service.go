package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// createOrder is declared once: what a key of POST /orders is for. Wait is shorter than the shop's slowest orders, so
// that the storm shows what "in progress" looks like.
var createOrder = idempotency.Operation{Name: "order.create", Wait: 250 * time.Millisecond}

// maxBody is the largest request body.
const maxBody = 1 << 20

// service is the shop.
type service struct {
	pool     *pgxpool.Pool
	runner   *txn.Runner
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
		Operations: []idempotency.Operation{createOrder, paying.operation()}, Fronts: fronts, OnEvent: noteAnswered,
	})
	if err != nil {
		return nil, err
	}
	return &service{pool: pool, runner: runner, payments: paying, unsafe: unsafe, think: think, log: log}, nil
}

func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.postOrder)
	mux.HandleFunc("GET /orders/{id}", s.getOrder)
	mux.HandleFunc("PUT /orders/{id}/status", s.putStatus)
	mux.HandleFunc("POST /orders/{id}/pay", s.postPayment)
	mux.HandleFunc("GET /stock/{sku}", s.getStock)
	for pattern, allow := range map[string]string{
		"/orders": "POST", "/orders/{id}": "GET, HEAD", "/orders/{id}/status": "PUT", "/orders/{id}/pay": "POST", "/stock/{sku}": "GET, HEAD",
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", allow)
			newProblem(http.StatusMethodNotAllowed, "method-not-allowed", "This is not done here.", "Use "+allow+".").write(w)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		notFound("Try POST /orders, GET /orders/{id}, PUT /orders/{id}/status, POST /orders/{id}/pay or GET /stock/{sku}.").write(w)
	})
	return mux
}

// postOrder takes an order, once per key.
func (s *service) postOrder(w http.ResponseWriter, r *http.Request) {
	req, in, err := readOrder(w, r)
	if err != nil {
		s.fail(w, r, req.Key, err)
		return
	}
	ctx, answeredBy := withAnswered(r.Context())
	placed, replayed, err := s.place(ctx, req, in)
	if replayed {
		w.Header().Set(headerReplayed, "true") // also where the outcome is a refusal
		w.Header().Set(headerAnsweredBy, *answeredBy)
	}
	if err != nil {
		s.fail(w, r, req.Key, err)
		return
	}
	w.Header().Set("Location", "/orders/"+strconv.FormatInt(placed.ID, 10))
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusCreated, placed)
}

// readOrder makes of an HTTP request what the shop and the library want to know.
func readOrder(w http.ResponseWriter, r *http.Request) (req idempotency.Request, in orderRequest, err error) {
	if req.Key, err = parseKey(createOrder, r.Header); err != nil {
		return req, in, err
	}
	body, err := readBody(w, r)
	if err != nil {
		return req, in, err
	}
	if in, err = parseOrder(body); err != nil {
		return req, in, err
	}
	// The body as it came: a client that retries sends the same bytes.
	req.Fingerprint = idempotency.FingerprintBytes([]byte(r.Method+" "+r.URL.Path), body)
	req.Client = in.Customer
	return req, in, nil
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if tooLarge := (*http.MaxBytesError)(nil); err != nil && !errors.As(err, &tooLarge) {
		err = invalid("body", "must arrive whole")
	}
	return body, err
}

// place is the whole of what the library asks of a service. ctx is the request's: when the client hangs up, the
// transaction is rolled back, record and all, unless its COMMIT is on the way already; a retry finds out which.
func (s *service) place(ctx context.Context, req idempotency.Request, in orderRequest) (placed *order, replayed bool, err error) {
	key := req.Key.Value()
	if s.unsafe {
		err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
			placed, err = placeOrder(ctx, tx, key, in, s.think(key))
			return err
		})
		return placed, false, err
	}
	res, err := txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (*order, error) {
		placed, err := placeOrder(ctx, tx, key, in, s.think(key))
		if refused := (*refusal)(nil); errors.As(err, &refused) {
			err = txn.Final(refused.code, refused) // recorded, and told again to every retry
		}
		return placed, err
	})
	return res.Value, res.Replayed, err
}

func (s *service) getOrder(w http.ResponseWriter, r *http.Request) {
	found := &order{}
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		notFound("Order ids are numbers.").write(w)
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
		notFound("That cannot be the name of anything we sell.").write(w)
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
		notFound("There is no such row.").write(w)
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
	p.write(w)
}
