package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/redisfront"
)

// envPayer makes this program a service of its own that pays one order, for somebody who is going to kill it.
const envPayer = "PGONCE_DEMO_PAYER"

// payerOrder is what it is to pay, and where.
type payerOrder struct {
	Database, Gateway string
	Order             int64
	Key               string
}

// payAndDie is that service, and its client.
func payAndDie(ctx context.Context, text string) error {
	var o payerOrder
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	gateway, err := url.Parse(o.Gateway)
	if err != nil {
		return err
	}
	cfg := instanceConfig{
		database: o.Database, conns: 2, gateway: gateway, think: stormThink, log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	i, err := openInstance(ctx, cfg, nil)
	if err != nil {
		return err
	}
	defer i.close()
	listener, err := listen(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := i.serve(ctx, listener); err != nil {
		return err
	}
	pay := i.base.JoinPath("orders", strconv.FormatInt(o.Order, 10), "pay").String()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, pay, strings.NewReader(`{"card":"`+cardSlow+`"}`))
	if err != nil {
		return err
	}
	req.Header.Set(idempotencyhttp.HeaderKey, o.Key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	_ = resp.Body.Close() // nobody was to get as far as this
	return fmt.Errorf("the payment was answered %s", resp.Status)
}

// rescueTimeout is longer than a lease.
const rescueTimeout = 20 * time.Second

// showCrash kills a service between a charge and its record, and lets the compensator finish the payment. good: there is one
// charge, and it is booked.
func (d *demo) showCrash(ctx context.Context, pool *pgxpool.Pool, database string, paying *servedGateway) (good bool, err error) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(d.out, "  "+format+"\n", args...) }
	_, _ = fmt.Fprintln(d.out, "A payment whose service dies:")
	var id int64
	err = pool.QueryRow(ctx, `INSERT INTO demo.orders (idempotency_key, customer, sku, quantity) VALUES ('crash', 'c-7', 'tea', 1) RETURNING id`).Scan(&id)
	if err != nil {
		return false, err
	}
	if err := d.killPayer(ctx, payerOrder{Database: database, Gateway: paying.base.String(), Order: id, Key: "crash"}, paying); err != nil {
		return false, err
	}
	var state, status string
	look := func() error {
		return pool.QueryRow(ctx, `SELECT a.stored_state, o.status FROM idempotency.audit AS a, demo.orders AS o
			WHERE a.key = 'crash' AND a.operation = 'payment.capture' AND o.id = $1`, id).Scan(&state, &status)
	}
	if err := look(); err != nil {
		return false, err
	}
	say("the gateway has charged order %d, and the service is killed before it knows: charges %d, record %s, order %s", id, paying.of(id), state, status)
	c, err := newCompensator(pool, paying, nil)
	if err != nil {
		return false, err
	}
	began := time.Now()
	for resolved := 0; resolved == 0; {
		report, err := c.RunOnce(ctx)
		if err != nil {
			return false, err
		}
		resolved = report.Resolved
		if time.Since(began) > rescueTimeout {
			return false, errors.New("the compensator did not finish the payment")
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	if err := look(); err != nil {
		return false, err
	}
	say("its client never comes back; %.1f s later the compensator has asked the gateway: charges %d, record %s, order %s",
		time.Since(began).Seconds(), paying.of(id), state, status)
	_, _ = fmt.Fprintln(d.out)
	return paying.of(id) == 1 && status == "paid", nil
}

// newCompensator makes the one that every deployment of the service has, in one of its processes or in all.
// front is nil without a Redis.
func newCompensator(pool *pgxpool.Pool, paying *servedGateway, front *redisfront.Front) (*compensator.Compensator, error) {
	p := &payments{gateway: &gatewayClient{base: paying.base}, pool: pool}
	cfg := &compensator.Config{Operations: operations(p), Interval: 5 * time.Second}
	if front != nil {
		cfg.Fronts = []idempotency.Auditable{front}
	}
	return compensator.New(pool, cfg)
}

// killPayer starts a service that pays, and kills it as soon as the gateway has charged.
func (d *demo) killPayer(ctx context.Context, o payerOrder, paying *servedGateway) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	charged := paying.await(o.Order)
	var output strings.Builder
	payer := exec.CommandContext(ctx, self)
	payer.Env, payer.Stderr = append(os.Environ(), envPayer+"="+string(text)), &output
	if err := payer.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- payer.Wait() }()
	select {
	case <-charged:
		_ = payer.Process.Kill() // SIGKILL: it can do nothing any more
		if err := <-ended; err == nil {
			return errors.New("the payment was over before its service was killed")
		}
		return nil
	case err := <-ended:
		return fmt.Errorf("the service that was to pay order %s ended by itself: %w: %s", strconv.FormatInt(o.Order, 10), err, output.String())
	}
}

// await returns a channel that is closed when the order is charged.
func (g *gateway) await(order int64) <-chan struct{} {
	charged := make(chan struct{})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.onCharge = func(done charge) {
		if done.Order == order {
			close(charged)
		}
	}
	return charged
}
