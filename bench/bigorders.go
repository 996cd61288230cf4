package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// placed is an order's key with all its parts. It is small, and what many have in common is there once: a replay that misses
// this program's cache more often than another one would be charged to the table.
type placed struct {
	tenant    string
	operation *idempotency.Operation
	order     order
}

var errNotFresh, errNotReplayed = errors.New("a fresh order was replayed"), errors.New("a record was not replayed")

func selectPlaced(ctx context.Context, conn *pgx.Conn, sql string) ([]placed, error) {
	rows, err := conn.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	tenants, operations := map[string]string{}, map[string]*idempotency.Operation{}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (placed, error) {
		p := placed{order: bigPayload}
		var tenant, operation string
		if err := row.Scan(&tenant, &operation, &p.order.key); err != nil {
			return p, err
		}
		if tenants[tenant] == "" {
			tenants[tenant] = tenant
		}
		if operations[operation] == nil {
			operations[operation] = &idempotency.Operation{Name: operation}
		}
		p.tenant, p.operation = tenants[tenant], operations[operation]
		return p, nil
	})
	if err == nil && len(all) < 1000 {
		err = fmt.Errorf("only %d records to replay", len(all))
	}
	return all, err
}

// pairs are the tenants and operations that Fill has made, for fresh orders.
func (s *shop) pairs() []placed {
	seen, all := map[string]bool{}, []placed{}
	for _, p := range s.keys {
		if pair := p.tenant + "/" + p.operation.Name; !seen[pair] {
			seen[pair] = true
			all = append(all, p)
		}
	}
	return all
}

func (s *shop) runner(pool *pgxpool.Pool) (*txn.Runner, error) {
	return txn.New(pool, &txn.Config{Operations: s.operations})
}

// call places an order, or asks for it again.
func (p placed) call(ctx context.Context, runner *txn.Runner, retry bool) (replayed bool, err error) {
	key, err := p.operation.Key(p.tenant, p.order.key)
	if err != nil {
		return false, err
	}
	req := idempotency.Request{Key: key, Fingerprint: bigFingerprint(), Retry: retry}
	res, err := txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		if err := p.order.place(ctx, tx); err != nil {
			return nil, err
		}
		return fmt.Appendf(nil, `{"order": %-*q}`, resultSize-11, p.order.key), nil
	})
	if err == nil && len(res.Value) != resultSize {
		err = fmt.Errorf("the result has %d bytes", len(res.Value))
	}
	return res.Replayed, err
}

// freshIn places orders of all tenants and operations.
func (s *shop) freshIn(ctx context.Context, p *pools) (variant, error) {
	pool, err := s.oldPool(ctx, p)
	if err != nil {
		return variant{}, err
	}
	place, err := s.placing(pool)
	return variant{name: "fresh-" + s.Name, worker: func(int, int) func(context.Context) error { return place }}, err
}

func (s *shop) placing(pool *pgxpool.Pool) (func(context.Context) error, error) {
	pairs := s.pairs()
	runner, err := s.runner(pool)
	return func(ctx context.Context) error {
		one := pairs[rand.IntN(len(pairs))]
		var id uuid.UUID
		var err error
		if s.random {
			id, err = uuid.NewRandom()
		} else {
			id, err = uuid.NewV7()
		}
		if err != nil {
			return err
		}
		one.order = order{key: id.String(), item: 1 + rand.IntN(10000), quantity: 1}
		replayed, err := one.call(ctx, runner, false)
		if err == nil && replayed {
			err = errNotFresh
		}
		return err
	}, err
}

// What every connection of a pool does before it counts. No sequential scan: that one does not keep what it reads.
const (
	noOtherPlan = `SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; SET max_parallel_workers_per_gather = 0`
	seeKeys     = `SELECT count(*) FROM (SELECT FROM idempotency.records ORDER BY key, tenant, operation OFFSET 0) AS every`
	seeRecords  = `SELECT count(result) FROM (SELECT result FROM idempotency.records ORDER BY expires_at OFFSET 0) AS every`
)

// oldPool is a pool whose connections have seen every page of the keys' index, and of what else is asked for, as those of
// a service have: when a server process looks at a page of shared_buffers for the first time, its memory must be mapped.
func (s *shop) oldPool(ctx context.Context, p *pools, see ...string) (*pgxpool.Pool, error) {
	pool, err := p.oursAt(ctx, s.database.URL)
	if err != nil {
		return nil, err
	}
	conns := pool.AcquireAllIdle(ctx)
	defer func() {
		for _, conn := range conns {
			conn.Release()
		}
	}()
	statements := slices.Concat([]string{noOtherPlan, seeKeys}, see, []string{`RESET ALL`})
	for _, conn := range conns {
		for _, sql := range statements {
			if _, err := conn.Conn().PgConn().Exec(ctx, sql).ReadAll(); err != nil {
				return nil, err
			}
		}
	}
	return pool, nil
}

// retryIn replays with Request.Retry.
func (s *shop) retryIn(ctx context.Context, p *pools, name string, keys []placed) (variant, error) {
	pool, err := s.oldPool(ctx, p, seeRecords)
	if err != nil {
		return variant{}, err
	}
	runner, err := s.runner(pool)
	return variant{name: name, worker: func(int, int) func(context.Context) error {
		return func(ctx context.Context) error { return replayOne(ctx, runner, keys, true) }
	}}, err
}

func replayOne(ctx context.Context, runner *txn.Runner, keys []placed, retry bool) error {
	replayed, err := keys[rand.IntN(len(keys))].call(ctx, runner, retry)
	if err == nil && !replayed {
		err = errNotReplayed
	}
	return err
}

// A runner learns of many duplicates after some twenty of an operation. Each of these is used for less.
const (
	bigRunners = 100
	perRunner  = 80 // 8 of each operation on average: they come by chance
)

// replayIn replays without Retry, before the runner has learned.
func (s *shop) replayIn(ctx context.Context, p *pools, name string, keys []placed) (variant, error) {
	pool, err := s.oldPool(ctx, p, seeRecords)
	if err != nil {
		return variant{}, err
	}
	var runners []*txn.Runner
	var used atomic.Int64
	return variant{
		name: name,
		prepare: func(ctx context.Context) error {
			runners = runners[:0]
			used.Store(0)
			for range bigRunners {
				runner, err := s.runner(pool)
				if err == nil {
					err = replayOne(ctx, runner, keys, false) // its first call looks at the schema
				}
				if err != nil {
					return err
				}
				runners = append(runners, runner)
			}
			return nil
		},
		worker: func(int, int) func(context.Context) error {
			return func(ctx context.Context) error {
				i := int(used.Add(1)-1) / perRunner
				if i >= len(runners) {
					return errors.New("out of runners, raise bigRunners")
				}
				return replayOne(ctx, runners[i], keys, false)
			}
		},
	}, nil
}

// making collects the variants of a group.
func making(name, baseline string, names []string, makers ...func(context.Context, *pools) (variant, error)) group {
	return group{name: name, names: names, baselines: []string{baseline}, reads: !strings.HasPrefix(name, "big-fresh"), setup: func(ctx context.Context, _ *world, p *pools) ([]variant, error) {
		var variants []variant
		for _, make := range makers {
			v, err := make(ctx, p)
			if err != nil {
				return nil, err
			}
			variants = append(variants, v)
		}
		return variants, nil
	}}
}

func bigGroups(small, big, random, bigRandom *shop) []group {
	retry := func(s *shop, name string, keys []placed) func(context.Context, *pools) (variant, error) {
		return func(ctx context.Context, p *pools) (variant, error) { return s.retryIn(ctx, p, name, keys) }
	}
	replay := func(s *shop, name string, keys []placed) func(context.Context, *pools) (variant, error) {
		return func(ctx context.Context, p *pools) (variant, error) { return s.replayIn(ctx, p, name, keys) }
	}
	return []group{
		making("big-fresh", "fresh-100k", []string{"fresh-100k", "fresh-big"}, small.freshIn, big.freshIn),
		making("big-fresh-random", "fresh-100k-random", []string{"fresh-100k-random", "fresh-big-random"},
			random.freshIn, bigRandom.freshIn),
		// The youngest records in groups of their own: beside all of them they would be thrown out of the cache.
		making("big-retry", "retry-100k", []string{"retry-100k", "retry-big"},
			retry(small, "retry-100k", small.keys), retry(big, "retry-big", big.keys)),
		making("big-retry-recent", "retry-100k", []string{"retry-100k", "retry-big-recent"},
			retry(small, "retry-100k", small.keys), retry(big, "retry-big-recent", big.recent)),
		making("big-replay", "replay-100k", []string{"replay-100k", "replay-big"},
			replay(small, "replay-100k", small.keys), replay(big, "replay-big", big.keys)),
		making("big-replay-recent", "replay-100k", []string{"replay-100k", "replay-big-recent"},
			replay(small, "replay-100k", small.keys), replay(big, "replay-big-recent", big.recent)),
	}
}

// afterCheckpoint is what the first orders after a checkpoint cost: each page they touch for the first time is written
// to the log as a whole.
type afterCheckpoint struct {
	Name      string  `json:"name"`
	Orders    int     `json:"orders"`
	OpsPerSec float64 `json:"ops_per_second"`
	WALBytes  float64 `json:"wal_bytes_per_op"`
	ToSmall   ratio   `json:"ratio_to_100k"` // of keys of the same kind
}

const (
	checkpointOrders  = 10_000
	checkpointCallers = 8
)

// measureCheckpoints takes pairs of databases, small and big.
func measureCheckpoints(ctx context.Context, w *world, rounds int, shops ...*shop) ([]afterCheckpoint, error) {
	rates, wal := make([][]float64, len(shops)), make([][]float64, len(shops))
	for range rounds {
		for _, i := range rand.Perm(len(shops)) {
			rate, bytes, err := shops[i].placeAfterCheckpoint(ctx, w)
			if err != nil {
				return nil, err
			}
			rates[i], wal[i] = append(rates[i], rate), append(wal[i], bytes)
		}
	}
	results := make([]afterCheckpoint, len(shops))
	for i, s := range shops {
		results[i] = afterCheckpoint{
			Name: s.Name, Orders: checkpointOrders, OpsPerSec: median(rates[i]), WALBytes: median(wal[i]),
			ToSmall: ratioOf(rates[i], rates[i-i%2]),
		}
	}
	return results, nil
}

func (s *shop) placeAfterCheckpoint(ctx context.Context, w *world) (rate, wal float64, err error) {
	pool, err := openPool(ctx, s.database.URL, checkpointCallers, txn.ConfigurePool)
	if err != nil {
		return 0, 0, err
	}
	defer pool.Close()
	place, err := s.placing(pool)
	if err != nil {
		return 0, 0, err
	}
	if _, err := w.control.Exec(ctx, `CHECKPOINT`); err != nil {
		return 0, 0, err
	}
	before, err := w.wal(ctx)
	if err != nil {
		return 0, 0, err
	}
	var all sync.WaitGroup
	errs := make([]error, checkpointCallers)
	begin := time.Now()
	for i := range errs {
		all.Go(func() {
			for range checkpointOrders / checkpointCallers {
				if errs[i] = place(ctx); errs[i] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	took := time.Since(begin)
	after, err := w.wal(ctx)
	return checkpointOrders / took.Seconds(), float64(after-before) / checkpointOrders, errors.Join(append(errs, err)...)
}
