package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

// overHTTP is a fresh order that comes as a request: by the middleware, and by a handler that calls WithIdempotency itself. The
// handlers are called without a network: between them it would be all that could be seen.
var overHTTP = group{
	name:      "http",
	names:     []string{"http-bare", "http-by-hand", "http-middleware"},
	baselines: []string{"http-bare", "http-by-hand"},
	setup:     setupHTTP,
}

func setupHTTP(ctx context.Context, _ *world, p *pools) ([]variant, error) {
	bare, err := p.plain(ctx)
	if err != nil {
		return nil, err
	}
	variants := []variant{requesting("http-bare", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, _, err := readOrder(r)
		if err == nil {
			err = placeBare(r.Context(), bare, o)
		}
		answerOrder(w, o.receipt(), err)
	}))}
	var runners [2]*txn.Runner
	for i := range runners {
		pool, err := p.ours(ctx)
		if err != nil {
			return nil, err
		}
		if runners[i], err = txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}}); err != nil {
			return nil, err
		}
	}
	once, err := idempotencyhttp.New(runners[1], idempotencyhttp.SingleTenant, nil)
	if err != nil {
		return nil, err
	}
	return append(
		variants,
		requesting("http-by-hand", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			receipt, err := onceByHand(r, runners[0])
			answerOrder(w, receipt, err)
		})),
		requesting("http-middleware", once.Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			o, _, err := readOrder(r)
			if err == nil {
				tx, _ := txn.FromContext(r.Context())
				err = o.place(r.Context(), tx)
			}
			answerOrder(w, o.receipt(), err)
		}))),
	), nil
}

// onceByHand is what a careful handler does without the middleware: key and fingerprint of the request, and the receipt is kept.
func onceByHand(r *http.Request, runner *txn.Runner) ([]byte, error) {
	o, body, err := readOrder(r)
	if err != nil {
		return nil, err
	}
	value, err := idempotencyhttp.KeyValue(r.Header, false)
	if err != nil {
		return nil, err
	}
	var req idempotency.Request
	if req.Key, err = create.Key(idempotency.SingleTenant, value); err != nil {
		return nil, err
	}
	if req.Fingerprint, err = idempotencyhttp.FingerprintRequest(r, body); err != nil {
		return nil, err
	}
	res, err := txn.WithIdempotency(r.Context(), runner, req, o.run)
	if err == nil && res.Replayed {
		err = errReplayed
	}
	return res.Value, err
}

// readOrder is all three handlers' reading of the request.
func readOrder(r *http.Request) (o order, body []byte, err error) {
	if body, err = io.ReadAll(io.LimitReader(r.Body, idempotencyhttp.DefaultMaxBody)); err != nil {
		return o, nil, err
	}
	o.key = r.Header.Get(idempotencyhttp.HeaderKey)
	_, err = fmt.Sscanf(string(body), `{"item":%d,"quantity":%d}`, &o.item, &o.quantity)
	return o, body, err
}

// answerOrder is all three handlers' answer.
func answerOrder(w http.ResponseWriter, receipt []byte, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("Location", "/orders/7")
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(receipt) // sink cannot fail
}

// requesting is a variant that sends one fresh order after another to a handler.
func requesting(name string, h http.Handler) variant {
	return ordering(name, func(ctx context.Context, o order) error {
		ctx, cancel := context.WithCancel(ctx) // as net/http does: pgx then watches the context of every statement
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "/orders", bytes.NewReader(o.payload()))
		if err != nil {
			return err
		}
		r.Header.Set(idempotencyhttp.HeaderKey, o.key)
		r.Header.Set("Content-Type", "application/json")
		w := sink{header: http.Header{}}
		h.ServeHTTP(&w, r)
		if w.status != http.StatusCreated || w.n != resultSize || w.header.Get("Location") == "" || w.header.Get(idempotencyhttp.HeaderReplayed) != "" {
			return fmt.Errorf("%s answered %d with %d bytes", name, w.status, w.n)
		}
		return nil
	})
}

// sink is a client that counts.
type sink struct {
	header    http.Header
	status, n int
}

func (s *sink) Header() http.Header { return s.header }

func (s *sink) WriteHeader(status int) { s.status = status }

func (s *sink) Write(p []byte) (int, error) {
	s.n += len(p)
	return len(p), nil
}
