package main

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// stormOptions say how much of a storm it is.
type stormOptions struct {
	users    int // requests at the same time, at most
	keys     int // of a round
	requests int // of a round
	duration time.Duration
}

// storm is bad clients against one service.
type storm struct {
	stormOptions
	pool   *pgxpool.Pool // to check what the clients were told, and for nothing else
	client *client
	sent   atomic.Int64 // requests that have ended, for whoever shows the progress
	slots  chan struct{}
	until  time.Time // zero: one round
}

func newStorm(pool *pgxpool.Pool, base *url.URL, o stormOptions) *storm {
	return &storm{stormOptions: o, pool: pool, client: newClient(base, o.users), slots: make(chan struct{}, o.users)}
}

// stormSKUs is how many things the storm buys, so that not every order waits for one row.
const stormSKUs = 20

// run plays the storm to its end. If ctx ends first, it returns its error.
func (s *storm) run(ctx context.Context) (*report, error) {
	defer s.client.close()
	_, err := s.pool.Exec(ctx, `
		INSERT INTO demo.stock (sku, quantity) SELECT 'bean-' || n, 1000000000 FROM generate_series(0, $1::integer - 1) n
		ON CONFLICT DO NOTHING`, stormSKUs)
	if err != nil {
		return nil, fmt.Errorf("fill the shelves: %w", err)
	}
	if s.duration > 0 {
		s.until = time.Now().Add(s.duration)
	}
	total := &report{}
	for round := 1; round == 1 || !s.over(); round++ {
		answers := s.round(ctx, round)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		// Only a round's answers are in memory: a storm may last for hours.
		if err := s.check(ctx, answers, total); err != nil {
			return nil, err
		}
		if s.until.IsZero() {
			break
		}
	}
	return total, nil
}

// over reports whether the time of a storm with a duration is over.
func (s *storm) over() bool { return !s.until.IsZero() && !time.Now().Before(s.until) }

// round plays a round and returns what the clients were told.
func (s *storm) round(ctx context.Context, round int) []told {
	numbers := make(chan int)
	perKey := s.requests / s.keys
	// As many keys at a time as there are users to gather around them.
	workers := min(max(s.users/perKey, 1), s.keys)
	answers := make([][]told, workers)
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			for number := range numbers {
				n := perKey
				if number < s.requests%s.keys {
					n++
				}
				answers[w] = append(answers[w], s.playKey(ctx, round, number, n)...)
			}
		})
	}
	for number := range s.keys {
		if ctx.Err() != nil || s.over() {
			break
		}
		numbers <- number
	}
	close(numbers)
	group.Wait()
	var all []told
	for _, some := range answers {
		all = append(all, some...)
	}
	return all
}

// playKey makes the n requests of one key.
func (s *storm) playKey(ctx context.Context, round, number, n int) []told {
	key := fmt.Sprintf("%s%d-%d", stormPrefix, round, number)
	body := fmt.Sprintf(`{"customer":"customer %d","sku":"bean-%d","quantity":%d}`, number, number%stormSKUs, 1+number%3)
	crowd, last := plan(number, n)
	answers := make(chan told, n)
	var group sync.WaitGroup
	for _, v := range crowd {
		group.Go(func() {
			for _, c := range v {
				pause(ctx, c.delay)
				answers <- s.send(ctx, key, body, c)
			}
		})
	}
	group.Wait()
	for range last {
		t := s.send(ctx, key, body, click{})
		answers <- t
		if !t.definite() {
			pause(ctx, max(t.retryAfter, 100*time.Millisecond))
		}
	}
	close(answers)
	var all []told
	for t := range answers {
		all = append(all, t)
	}
	return all
}

// send makes a request when there is a user free to make it.
func (s *storm) send(ctx context.Context, key, body string, c click) told {
	s.slots <- struct{}{}
	defer func() { <-s.slots }()
	defer s.sent.Add(1)
	return s.client.send(ctx, key, body, c)
}
