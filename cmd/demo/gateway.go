package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// gateway is somebody else's payment gateway, with a server and a memory of its own: whatever happens to the shop, what was
// charged is charged. It charges once for each key of its own, the downstream key.
type gateway struct {
	mu       sync.Mutex
	charges  map[string]charge // by downstream key
	voided   map[string]bool   // keys that it will never charge
	next     int
	slow     time.Duration // how long the card "slow" takes, after it was charged
	onCharge func(charge)  // nil: nobody wants to know
}

// charge is the body of POST /charges, and of its answer.
type charge struct {
	ID    string `json:"id,omitempty"`
	Order int64  `json:"order"`
	Cents int64  `json:"cents"`
	Card  string `json:"card"`
}

// The cards that do not simply pay.
const (
	cardRefused = "refused" // is refused, and the same again for the same key
	cardAway    = "away"    // finds the gateway out of order
	cardSlow    = "slow"    // is charged, and the answer takes its time
)

func newGateway(slow time.Duration) *gateway {
	return &gateway{charges: map[string]charge{}, voided: map[string]bool{}, slow: slow}
}

func (g *gateway) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /charges", g.post)
	mux.HandleFunc("GET /charges/{key}", g.get)
	mux.HandleFunc("POST /charges/{key}/void", g.void)
	return mux
}

func (g *gateway) post(w http.ResponseWriter, r *http.Request) {
	var wanted charge
	key := r.Header.Get(idempotencyhttp.HeaderKey)
	if err := json.NewDecoder(io.LimitReader(r.Body, maxBody)).Decode(&wanted); err != nil || key == "" {
		http.Error(w, "a key and a charge are needed", http.StatusBadRequest)
		return
	}
	switch wanted.Card {
	case cardAway:
		http.Error(w, "out of order", http.StatusServiceUnavailable)
		return
	case cardRefused:
		http.Error(w, "the card was refused", http.StatusPaymentRequired)
		return
	}
	done, voided := g.charge(key, wanted)
	if voided {
		http.Error(w, "this key was given up", http.StatusConflict)
		return
	}
	if wanted.Card == cardSlow {
		select {
		case <-time.After(g.slow):
		case <-r.Context().Done():
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusCreated, done)
}

func (g *gateway) charge(key string, wanted charge) (done charge, voided bool) {
	g.mu.Lock()
	done, again := g.charges[key]
	voided = g.voided[key]
	if !again && !voided {
		g.next++
		done = wanted
		done.ID = "ch_" + strconv.Itoa(g.next)
		g.charges[key] = done
	}
	told := g.onCharge
	g.mu.Unlock()
	if told != nil && !again && !voided {
		told(done)
	}
	return done, voided
}

func (g *gateway) get(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	done, there := g.charges[r.PathValue("key")]
	g.mu.Unlock()
	if !there {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusOK, done)
}

// void makes sure that a key is never charged, unless it was.
func (g *gateway) void(w http.ResponseWriter, r *http.Request) {
	key := r.PathValue("key")
	g.mu.Lock()
	_, there := g.charges[key]
	g.voided[key] = g.voided[key] || !there
	g.mu.Unlock()
	if there {
		http.Error(w, "it was charged", http.StatusConflict)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// of counts the charges of an order.
func (g *gateway) of(order int64) (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, done := range g.charges {
		if done.Order == order {
			n++
		}
	}
	return n
}

// gatewayClient is the shop's side of it.
type gatewayClient struct{ base *url.URL }

var (
	errCardRefused = errors.New("the card was refused")
	errNotCharged  = errors.New("the gateway has charged nothing")
	errGateway     = errors.New("the payment gateway does not work at the moment")
	errAway        = fmt.Errorf("%w: it is out of order and has charged nothing", errGateway)
)

func (c *gatewayClient) charge(ctx context.Context, key string, wanted charge) (done charge, err error) {
	body, err := json.Marshal(wanted)
	if err != nil {
		return done, err
	}
	return c.do(ctx, http.MethodPost, c.base.JoinPath("charges"), key, body)
}

func (c *gatewayClient) find(ctx context.Context, key string) (charge, error) {
	return c.do(ctx, http.MethodGet, c.base.JoinPath("charges", key), "", nil)
}

func (c *gatewayClient) void(ctx context.Context, key string) error {
	_, err := c.do(ctx, http.MethodPost, c.base.JoinPath("charges", key, "void"), "", nil)
	return err
}

func (c *gatewayClient) do(ctx context.Context, method string, to *url.URL, key string, body []byte) (done charge, err error) {
	req, err := http.NewRequestWithContext(ctx, method, to.String(), bytes.NewReader(body))
	if err != nil {
		return done, err
	}
	if key != "" {
		req.Header.Set(idempotencyhttp.HeaderKey, key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return done, fmt.Errorf("%w: %w", errGateway, err)
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK, http.StatusCreated:
		if err := json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(&done); err != nil {
			return done, fmt.Errorf("%w: %w", errGateway, err)
		}
		return done, nil
	case http.StatusNoContent:
		return done, nil
	case http.StatusPaymentRequired:
		return done, errCardRefused
	case http.StatusNotFound:
		return done, errNotCharged
	case http.StatusServiceUnavailable:
		return done, errAway
	}
	return done, fmt.Errorf("%w: it answered %s", errGateway, resp.Status)
}

// openGateway serves a gateway.
func openGateway(ctx context.Context, log *slog.Logger) (g *servedGateway, stop func(), err error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, fmt.Errorf("listen for the payment gateway: %w", err)
	}
	g = &servedGateway{gateway: newGateway(2 * time.Second)}
	if g.base, err = baseURL(listener); err != nil {
		_ = listener.Close()
		return nil, nil, err
	}
	return g, serve(ctx, listener, g.handler(), log), nil
}

// servedGateway is one that can be reached.
type servedGateway struct {
	*gateway
	base *url.URL
}
