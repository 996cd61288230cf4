package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

// fronted is a fresh order with fronts, which can only cost: they are told.
var fronted = group{
	name:      "fronted",
	names:     []string{"strict", "hybrid"},
	baselines: []string{"strict"},
	setup: func(ctx context.Context, w *world, p *pools) ([]variant, error) {
		strict, err := p.strict(ctx)
		if err != nil {
			return nil, err
		}
		hybrid, err := p.fronted(ctx, w, true, true)
		if err != nil {
			return nil, err
		}
		return []variant{
			ordering("strict", func(ctx context.Context, o order) error { return placeOnce(ctx, strict, o) }),
			ordering("hybrid", func(ctx context.Context, o order) error { return placeOnce(ctx, hybrid, o) }),
		}, nil
	},
}

// frontedReplay is an order that was placed before, answered by a front.
var frontedReplay = group{
	name:      "fronted-replay",
	names:     []string{"replay-pg", "replay-redis", "replay-local"},
	baselines: []string{"replay-pg"},
	setup: func(ctx context.Context, w *world, p *pools) ([]variant, error) {
		strict, err := p.strict(ctx)
		if err != nil {
			return nil, err
		}
		far, err := p.fronted(ctx, w, false, true)
		if err != nil {
			return nil, err
		}
		near, err := p.fronted(ctx, w, true, false)
		if err != nil {
			return nil, err
		}
		const placedBefore = 5000 // fewer than the local front keeps
		orders := make([]order, placedBefore)
		for i := range orders {
			if orders[i], err = newOrder(); err != nil {
				return nil, err
			}
			for _, runner := range []*txn.Runner{far, near} { // the second publishes what it finds
				if err := placeOnce(ctx, runner, orders[i]); err != nil && !errors.Is(err, errReplayed) {
					return nil, err
				}
			}
		}
		again := func(name string, runner *txn.Runner) variant {
			return variant{name: name, worker: func(i, n int) func(context.Context) error {
				return func(ctx context.Context) error {
					return placeAgain(ctx, runner, create, orders[rand.IntN(len(orders)/n)*n+i], true)
				}
			}}
		}
		return []variant{again("replay-pg", strict), again("replay-redis", far), again("replay-local", near)}, nil
	},
}

// strict makes a runner without fronts.
func (p *pools) strict(ctx context.Context) (*txn.Runner, error) {
	pool, err := p.ours(ctx)
	if err != nil {
		return nil, err
	}
	return txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
}

// client is a client of the world's Redis. It ends with the pools.
func (p *pools) client(w *world) (*redis.Client, error) {
	options, err := redis.ParseURL(w.stack.RedisURL())
	if err != nil {
		return nil, err
	}
	options.ContextTimeoutEnabled, options.PoolSize = true, max(10, p.size)
	client := redis.NewClient(options)
	p.closers = append(p.closers, client.Close)
	return client, nil
}

// fronted makes a runner with some of the fronts, and returns when they are asked.
func (p *pools) fronted(ctx context.Context, w *world, local, far bool) (*txn.Runner, error) {
	pool, err := p.ours(ctx)
	if err != nil {
		return nil, err
	}
	runner, _, err := p.frontedOn(ctx, w, pool, local, far, newPrefix())
	return runner, err
}

// frontedOn makes one on a pool, with its names in Redis. It also returns what counts its executions.
func (p *pools) frontedOn(ctx context.Context, w *world, pool *pgxpool.Pool, local, far bool, prefix string) (*txn.Runner, *atomic.Int64, error) {
	var all []idempotency.Front
	if local {
		f, err := localfront.New(nil)
		if err != nil {
			return nil, nil, err
		}
		p.closers = append(p.closers, f.Close)
		all = append(all, f)
	}
	if far {
		client, err := p.client(w)
		if err != nil {
			return nil, nil, err
		}
		f, err := redisfront.New(client, &redisfront.Config{Prefix: prefix}) //nolint:contextcheck // the front outlives this call
		if err != nil {
			return nil, nil, err
		}
		p.closers = append(p.closers, f.Close)
		all = append(all, f)
	}
	var fromFront, executed atomic.Int64
	runner, err := txn.New(pool, &txn.Config{
		Operations: []idempotency.Operation{create}, Fronts: all,
		OnEvent: func(_ context.Context, e idempotency.Event) {
			switch e := e.(type) {
			case idempotency.Replayed:
				if e.From != "" {
					fromFront.Add(1)
				}
			case idempotency.Executed:
				executed.Add(1)
			}
		},
	})
	if err != nil {
		return nil, nil, err
	}
	p.closers = append(p.closers, func() error { runner.Close(); return nil })
	o, err := newOrder()
	if err != nil {
		return nil, nil, err
	}
	for begun := time.Now(); fromFront.Load() == 0; {
		if err := placeOnce(ctx, runner, o); err != nil && !errors.Is(err, errReplayed) {
			return nil, nil, err
		}
		if time.Since(begun) > 10*time.Second {
			return nil, nil, errors.New("no front answers")
		}
		time.Sleep(10 * time.Millisecond)
	}
	executed.Store(0)
	return runner, &executed, nil
}

var prefixes atomic.Int64

// newPrefix is one that no other runner uses.
func newPrefix() string { return fmt.Sprintf("bench%d:", prefixes.Add(1)) }

// storm is a thousand impatient callers of a hundred keys, all at once.
const (
	stormCallers = 1000
	stormKeys    = 100
)

// stormResult is what a storm cost.
type stormResult struct {
	Runners    int     `json:"runners"`
	Trips      float64 `json:"postgres_round_trips"`
	Executions float64 `json:"executions"`
	MS         float64 `json:"ms"`
}

// measureStorm plays storms on as many runners, each with a pool and a local front of its own as a process has, and one
// Redis. Numbers are medians of the rounds, executions the most.
func measureStorm(ctx context.Context, w *world, runners, rounds int) (stormResult, error) {
	result := stormResult{Runners: runners}
	var trips, ms []float64
	for range rounds {
		one, err := playStorm(ctx, w, runners)
		if err != nil {
			return result, err
		}
		trips, ms = append(trips, one.Trips), append(ms, one.MS)
		result.Executions = max(result.Executions, one.Executions)
	}
	result.Trips, result.MS = median(trips), median(ms)
	return result, nil
}

func playStorm(ctx context.Context, w *world, n int) (r stormResult, err error) {
	var counted atomic.Int64
	count := func(cfg *pgxpool.Config) {
		dial := cfg.ConnConfig.DialFunc
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &countingConn{Conn: conn, trips: &counted}, err
		}
	}
	p := &pools{world: w, size: 10, configure: []func(*pgxpool.Config){count}}
	defer p.close()
	runners, executed := make([]*txn.Runner, n), make([]*atomic.Int64, n)
	prefix := newPrefix() // one for all: they are one service
	for i := range runners {
		pool, err := p.ours(ctx)
		if err != nil {
			return r, err
		}
		if runners[i], executed[i], err = p.frontedOn(ctx, w, pool, true, true, prefix); err != nil {
			return r, err
		}
	}
	reqs := make([]idempotency.Request, stormKeys)
	orders := make([]order, stormKeys)
	for i := range reqs {
		if orders[i], err = newOrder(); err != nil {
			return r, err
		}
		if reqs[i], err = request(create, orders[i]); err != nil {
			return r, err
		}
	}
	errs := make([]error, stormCallers)
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range stormCallers {
		all.Go(func() {
			<-start
			_, errs[i] = txn.WithIdempotency(ctx, runners[i%n], reqs[i%stormKeys], func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				return orders[i%stormKeys].run(ctx, tx)
			})
		})
	}
	counted.Store(0)
	begun := time.Now()
	close(start)
	all.Wait()
	r.MS, r.Trips = milliseconds(time.Since(begun)), float64(counted.Load())
	for i := range executed {
		r.Executions += float64(executed[i].Load())
	}
	return r, errors.Join(errs...)
}

// lookupResult is what a hit of the local front costs.
type lookupResult struct {
	Name   string  `json:"name"`
	NS     float64 `json:"ns"`
	Allocs int64   `json:"allocs"`
}

// measureLookups times Front.Lookup, with its check of key, epoch and fingerprint, on one of 10,000 entries.
func measureLookups(ctx context.Context) ([]lookupResult, error) {
	var results []lookupResult
	for _, kind := range []struct {
		name string
		make func(*localfront.Config) (*localfront.Front, error)
	}{{"go-cache", localfront.New}, {"otter", localfront.NewOtter}} {
		f, err := kind.make(nil)
		if err != nil {
			return nil, err
		}
		asks := make([]idempotency.Ask, 5000)
		for i := range asks {
			o, err := newOrder()
			if err != nil {
				return nil, err
			}
			req, err := request(create, o)
			if err != nil {
				return nil, err
			}
			asks[i] = idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint, Epoch: "one"}
			f.Publish(ctx, idempotency.Entry{Epoch: "one", Life: time.Hour, Record: idempotency.Record{
				Key: req.Key, State: idempotency.StateSuccess, Fence: 1, Generation: 1, Attempt: 1, Fingerprint: req.Fingerprint,
				ResultType: "bytes/1", Result: make([]byte, resultSize),
			}})
		}
		var missed atomic.Int64
		b := testing.Benchmark(func(b *testing.B) { //nolint:thelper // it is measured here
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, found, _ := f.Lookup(ctx, asks[i%len(asks)]); !found {
					missed.Add(1)
				}
			}
		})
		if missed.Load() > 0 {
			return nil, fmt.Errorf("%s: %d look-ups found nothing", kind.name, missed.Load())
		}
		results = append(results, lookupResult{Name: kind.name, NS: float64(b.T.Nanoseconds()) / float64(b.N), Allocs: b.AllocsPerOp()})
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	return results, nil
}
