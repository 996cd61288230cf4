package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Waiting: one order takes its time, its duplicates wait for it, and others place orders of their own on the same pool.
const (
	waiters     = 100
	waitingPool = 10
	others      = 8
	slowOrder   = 1500 * time.Millisecond
)

// waiting is where the waiters are.
type waiting struct {
	name  string
	apart bool
}

var waitings = []waiting{
	// In one process the runner merges calls of one key: waiters have no connection.
	{name: "waiting"},
	// Every waiter has a runner of its own, as in a hundred processes: each asks PostgreSQL again and again. They share
	// the pool, so they also take its connections from the others, which a hundred processes would not.
	{name: "waiting-apart", apart: true},
}

// waitingResult is what came of it.
type waitingResult struct {
	Name     string  `json:"name"`
	Waiters  int     `json:"waiters"`
	Replays  int     `json:"replays"` // in the worst round
	With     float64 `json:"others_per_second_with_waiters"`
	Without  float64 `json:"others_per_second_without_waiters"`
	Others   ratio   `json:"others_ratio"`
	WaiterMS float64 `json:"waiter_late_ms"` // p99 of a waiter's answer behind the end of the slow order
}

func measureWaiting(ctx context.Context, w *world, kind waiting, rounds int) (waitingResult, error) {
	result := waitingResult{Name: kind.name, Waiters: waiters, Replays: waiters}
	pool, err := w.pool(ctx, waitingPool, txn.ConfigurePool)
	if err != nil {
		return result, err
	}
	defer pool.Close()
	var with, without, late []float64
	for range rounds {
		for _, i := range rand.Perm(2) {
			crowd := i * waiters
			one, err := waitOnce(ctx, pool, crowd, kind.apart)
			if err != nil {
				return result, err
			}
			if crowd == 0 {
				without = append(without, one.others)
				continue
			}
			with, late = append(with, one.others), append(late, one.late)
			result.Replays = min(result.Replays, one.replays)
		}
	}
	result.With, result.Without, result.Others, result.WaiterMS = median(with), median(without), ratioOf(with, without), median(late)
	return result, nil
}

type waitingRound struct {
	others  float64 // orders per second
	replays int
	late    float64 // ms from the slow order's end to the last waiter's answer
}

func waitOnce(ctx context.Context, pool *pgxpool.Pool, crowd int, apart bool) (r waitingRound, err error) {
	newRunner := func() (*txn.Runner, error) {
		return txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	}
	runner, err := newRunner()
	if err != nil {
		return r, err
	}
	slow, err := newOrder()
	if err != nil {
		return r, err
	}
	req, err := request(create, slow)
	if err != nil {
		return r, err
	}
	runners := make([]*txn.Runner, crowd)
	for i := range runners {
		if runners[i] = runner; apart {
			if runners[i], err = newRunner(); err != nil {
				return r, err
			}
		}
	}
	var mu sync.Mutex
	var errs []error
	failed := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
	}

	var all sync.WaitGroup
	entered := make(chan struct{})
	var begun, ended time.Time
	all.Go(func() {
		_, err := txn.WithIdempotency(ctx, runner, req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			begun = time.Now()
			close(entered)
			time.Sleep(slowOrder)
			return slow.run(ctx, tx)
		})
		ended = time.Now()
		failed(err)
	})
	<-entered
	for i := range runners {
		all.Go(func() {
			res, err := txn.WithIdempotency(ctx, runners[i], req, slow.run)
			failed(err)
			mu.Lock()
			defer mu.Unlock()
			if err == nil && res.Replayed {
				r.replays++
			}
		})
	}
	// Until a little before the slow order ends: the end itself is a moment of its own.
	var busy sync.WaitGroup
	var placed [others]int
	start := time.Now()
	limit := slowOrder - time.Since(begun) - 100*time.Millisecond
	for i := range placed {
		busy.Go(func() {
			for time.Since(start) < limit {
				o, err := newOrder()
				if err == nil {
					err = placeOnce(ctx, runner, o)
				}
				if err != nil {
					failed(err)
					return
				}
				placed[i]++
			}
		})
	}
	busy.Wait()
	took := time.Since(start)
	all.Wait()
	r.late = milliseconds(time.Since(ended))
	for _, n := range placed {
		r.others += float64(n) / took.Seconds()
	}
	return r, errors.Join(errs...)
}
