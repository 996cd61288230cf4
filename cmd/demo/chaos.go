package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

// What -chaos breaks: so many of each kind.
const (
	chaosEach  = 20
	chaosLease = time.Second
	chaosWait  = 6 * time.Second
)

// chaos breaks what a crash, a restore or a bug may break, and has the compensator repair it in one pass.
type chaos struct {
	pool   *pgxpool.Pool
	store  *idempotency.Store
	front  *redisfront.Front
	client *redis.Client
	paying *servedGateway
	epoch  string
	ids    []int64 // orders whose payments died, the first half of them charged
}

// showChaos breaks things and shows what became of them. good: all is repaired.
func (d *demo) showChaos(ctx context.Context, pool *pgxpool.Pool, server *redisServer, front *redisfront.Front, paying *servedGateway) (good bool, err error) {
	c := &chaos{
		pool: pool, store: idempotency.NewStore(pgx.QueryExecModeCacheStatement), front: front,
		client: redis.NewClient(server.clientOptions()), paying: paying,
	}
	defer func() { err = errors.Join(err, c.client.Close()) }()
	healer, err := newCompensator(pool, paying, front)
	if err != nil {
		return false, err
	}
	_, _ = fmt.Fprintln(d.out, "Chaos: payments whose service dies, and a Redis that differs from PostgreSQL in every way:")
	if err := c.plant(ctx, healer); err != nil {
		return false, fmt.Errorf("chaos: %w", err)
	}
	// Leases end, and outcomes get old enough to be missed.
	select {
	case <-time.After(chaosWait):
	case <-ctx.Done():
		return false, ctx.Err()
	}
	before, err := c.look(ctx)
	if err != nil {
		return false, err
	}
	report, err := healer.RunOnce(ctx)
	if err != nil {
		return false, err
	}
	after, err := c.look(ctx)
	if err != nil {
		return false, err
	}
	_, _ = fmt.Fprintf(d.out, "  %-44s %6s  %s\n", "", "before", "after one pass")
	for i, line := range before {
		_, _ = fmt.Fprintf(d.out, "  %-44s %6d  %d\n", line.what, line.n, after[i].n)
	}
	paid, charges, err := c.settled(ctx)
	if err != nil {
		return false, err
	}
	_, _ = fmt.Fprintf(d.out, "  one pass took %.1f s. Payments that were charged are paid: %d of %d; charges: %d. The others may be paid anew.\n\n",
		report.Duration.Seconds(), paid, len(c.ids)/2, charges)
	good = paid == len(c.ids)/2 && charges == len(c.ids)/2
	for i := range before {
		good = good && before[i].n > 0 && after[i].n == 0
	}
	return good, nil
}

func (c *chaos) plant(ctx context.Context, healer *compensator.Compensator) (err error) {
	if c.epoch, _, err = c.store.Epoch(ctx, c.pool); err != nil {
		return err
	}
	if _, err := healer.HealOnce(ctx); err != nil { // what the storm has left is not ours
		return err
	}
	if err := c.killPayments(ctx); err != nil {
		return err
	}
	return c.spoilRedis(ctx)
}

// killPayments leaves what services leave that die before, or behind, their call of the gateway.
func (c *chaos) killPayments(ctx context.Context) error {
	p := &payments{gateway: &gatewayClient{base: c.paying.base}, pool: c.pool}
	operation := p.operation()
	for i := range chaosEach {
		value := fmt.Sprint("chaos-", i)
		var id int64
		err := c.pool.QueryRow(ctx, `INSERT INTO demo.orders (idempotency_key, customer, sku, quantity) VALUES ($1, 'c-9', 'tea', 1) RETURNING id`, value).Scan(&id)
		if err != nil {
			return err
		}
		key, err := operation.Key(idempotency.SingleTenant, value)
		if err != nil {
			return err
		}
		a, err := c.store.AcquireLease(ctx, c.pool, &idempotency.LeaseRequest{
			Request:      idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(value))},
			AttemptToken: idempotency.NewAttemptToken(), Lease: chaosLease, Takeover: idempotency.TakeoverResolve, CanResolve: true,
		})
		if err != nil {
			return err
		}
		if i < chaosEach/2 {
			if _, err := p.gateway.charge(ctx, a.Record.DownstreamKey(chargeStep), charge{Order: id, Cents: pricePerPiece, Card: "4242"}); err != nil {
				return err
			}
		}
		c.ids = append(c.ids, id)
	}
	return nil
}

// spoilRedis plants every difference that one restart of Redis does not end.
func (c *chaos) spoilRedis(ctx context.Context) error {
	rows, err := c.pool.Query(ctx, `SELECT key FROM idempotency.records
		WHERE operation = $1 AND state = 'SUCCESS' ORDER BY completed_at LIMIT $2`, createOrder.Name, 3*chaosEach)
	if err != nil {
		return err
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	keys := make([]idempotency.Key, len(values))
	for i, value := range values {
		if keys[i], err = createOrder.Key(idempotency.SingleTenant, value); err != nil {
			return err
		}
	}
	kept, err := c.front.Inspect(ctx, keys)
	if err != nil {
		return err
	}
	for i, k := range kept {
		if k.Name == "" {
			continue // not there: missing already
		}
		switch i % 3 {
		case 0: // missing
			err = c.client.Del(ctx, k.Name).Err()
		case 1: // wrong
			forged := k.Record.Clone()
			forged.Fence++
			forged.Result = []byte(`{"id":0,"status":"forged"}`)
			c.front.Publish(ctx, idempotency.Entry{Record: forged, Epoch: c.epoch, Life: time.Hour})
		default: // endless
			err = c.client.Persist(ctx, k.Name).Err()
		}
		if err != nil {
			return err
		}
	}
	for i := range chaosEach {
		rolledBack, err := createOrder.Key(idempotency.SingleTenant, fmt.Sprint("rolled-back-", i))
		if err != nil {
			return err
		}
		now := time.Now()
		c.front.Publish(ctx, idempotency.Entry{Epoch: c.epoch, Life: time.Hour, Record: idempotency.Record{
			Key: rolledBack, State: idempotency.StateSuccess, Fence: 1, Generation: 1, Attempt: 1, Fingerprint: idempotency.NoFingerprint,
			AttemptToken: idempotency.NewAttemptToken(), CreatedAt: now, AcquiredAt: now, CompletedAt: now, ResultType: "json/1",
		}})
		nobodys, err := createOrder.Key(idempotency.SingleTenant, fmt.Sprint("nobodys-", i))
		if err != nil {
			return err
		}
		ask := idempotency.Ask{Key: nobodys, Fingerprint: idempotency.NoFingerprint, Epoch: c.epoch}
		if _, _, err := c.front.Begin(ctx, ask, idempotency.NewAttemptToken(), time.Hour); err != nil {
			return err
		}
	}
	return c.front.Flush(ctx)
}

// counted is a line of the table.
type counted struct {
	what string
	n    int
}

// look counts what is wrong at the moment.
func (c *chaos) look(ctx context.Context) ([]counted, error) {
	var stale int
	if err := c.pool.QueryRow(ctx, `SELECT count(*) FROM idempotency.stale`).Scan(&stale); err != nil {
		return nil, err
	}
	looker, err := compensator.New(c.pool, &compensator.Config{
		Operations: []idempotency.Operation{createOrder}, Fronts: []idempotency.Auditable{c.front}, DryRun: true,
	})
	if err != nil {
		return nil, err
	}
	r, err := looker.HealOnce(ctx)
	return []counted{
		{"payments nobody works on", stale},
		{"outcomes that are not in Redis", r.Missing},
		{"forged outcomes in Redis", r.Wrong},
		{"outcomes in Redis that were rolled back", r.NoRecord},
		{"outcomes in Redis that would stay for ever", r.Endless},
		{`"running" in Redis, and nobody runs it`, r.NoOwner},
	}, err
}

// settled is what became of the payments.
func (c *chaos) settled(ctx context.Context) (paid, charges int, err error) {
	err = c.pool.QueryRow(ctx, `SELECT count(*) FROM demo.orders WHERE id = ANY ($1) AND status = 'paid'`, c.ids).Scan(&paid)
	for _, id := range c.ids {
		charges += c.paying.of(id)
	}
	return paid, charges, err
}
