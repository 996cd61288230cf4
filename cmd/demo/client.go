package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// What a client was told. Every request ends as one of these.
type outcome int

const (
	executed     outcome = iota // 201: the order was created
	replayed                    // 201 again, from the record
	inProgress                  // 409: try again
	disconnected                // nothing: the client had gone before it was told anything
	failed                      // everything else
	outcomes     = iota
)

// told is what one request came to, as its client sees it.
type told struct {
	key        string
	outcome    outcome
	by         string // who gave a replay
	order      int64  // of a 201
	refused    bool   // the client was told that there is and will be no order
	detail     string // of a failed one
	retryAfter time.Duration
	took       time.Duration
}

func (t told) definite() bool { return t.outcome == executed || t.outcome == replayed || t.refused }

// longestPatience ends a request that hangs, which is then an error and no client's fault.
const longestPatience = time.Minute

// client sends orders as strangers would: over HTTP, knowing nothing of the service's inside.
type client struct{ http *http.Client }

func newClient(users int) *client {
	return &client{http: &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{}).DialContext,
		MaxIdleConnsPerHost: users,
	}}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// send makes one request, as this click wants it.
func (c *client) send(ctx context.Context, base *url.URL, key, body string, k click) told {
	started := time.Now()
	t := told{key: key}
	if k.hangUp {
		t.outcome = disconnected
		if err := c.sendAndHangUp(ctx, base, key, body, k); err != nil {
			t.outcome, t.detail = failed, err.Error()
		}
		return t
	}
	patience := longestPatience
	if k.patience > 0 {
		patience = k.patience
	}
	impatient, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := c.sendAndRead(impatient, base, key, body, &t); err != nil {
		t.outcome, t.detail = failed, err.Error()
		if k.patience > 0 && impatient.Err() != nil {
			t.outcome = disconnected
		}
	}
	t.took = time.Since(started)
	return t
}

func (c *client) sendAndRead(ctx context.Context, base *url.URL, key, body string, t *told) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base.JoinPath("/orders").String(), strings.NewReader(body))
	if err != nil {
		return err
	}
	// Without it net/http cannot send the body again by itself, which it otherwise does for requests with our header:
	// every request is to count once.
	req.GetBody = nil
	req.Header.Set(idempotencyhttp.HeaderKey, key)
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close() // it has been read, or the error says why not
	if err != nil {
		return err
	}
	return t.read(resp, answer)
}

// read takes down what the client was told.
func (t *told) read(resp *http.Response, answer []byte) error {
	switch resp.StatusCode {
	case http.StatusCreated:
		var placed order
		if err := json.Unmarshal(answer, &placed); err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		t.outcome, t.order = executed, placed.ID
		if resp.Header.Get(idempotencyhttp.HeaderReplayed) == "true" {
			t.outcome, t.by = replayed, resp.Header.Get(headerAnsweredBy)
		}
	case http.StatusConflict:
		t.outcome = inProgress
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After")) // 0 if it is not there
		t.retryAfter = time.Duration(seconds) * time.Second
	default:
		t.outcome, t.detail = failed, resp.Status+" "+string(answer)
		t.refused = resp.StatusCode < http.StatusInternalServerError
	}
	return nil
}

// sendAndHangUp closes the connection in the middle. An error means that the service was not even reached.
func (c *client) sendAndHangUp(ctx context.Context, base *url.URL, key, body string, k click) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", base.Host)
	if err != nil {
		return err
	}
	sent := body
	if k.half {
		sent = body[:len(body)/2]
	}
	_, err = fmt.Fprintf(conn, "POST /orders HTTP/1.1\r\nHost: %s\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s",
		base.Host, idempotencyhttp.HeaderKey, key, len(body), sent)
	if err == nil {
		pause(ctx, k.patience)
	}
	_ = conn.Close() // whatever it says: this client has gone
	return err
}

// pause waits, or returns early when ctx ends.
func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
