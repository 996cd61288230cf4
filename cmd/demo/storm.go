package main

import (
	"context"
	"fmt"
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

// storm is bad clients against the instances of a service.
type storm struct {
	stormOptions
	pool      *pgxpool.Pool // to check what the clients were told, and for nothing else
	instances []*instance
	client    *client
	sent      atomic.Int64 // requests that have ended, for whoever shows the progress
	slots     chan struct{}
	until     time.Time // zero: one round
}

func newStorm(pool *pgxpool.Pool, instances []*instance, o stormOptions) *storm {
	return &storm{stormOptions: o, pool: pool, instances: instances, client: newClient(o.users), slots: make(chan struct{}, o.users)}
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
	before := s.statements()
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
	total.setStatements(s.statements() - before)
	return total, nil
}

// statements is how many the instances have sent to PostgreSQL so far.
func (s *storm) statements() (n int64) {
	for _, i := range s.instances {
		n += i.statements.Load()
	}
	return n
}

// share is how much of a storm that began then is over, from 0 to 1.
func (s *storm) share(started time.Time) float64 {
	if s.duration > 0 {
		return min(float64(time.Since(started))/float64(s.duration), 1)
	}
	return float64(s.sent.Load()) / float64(s.requests)
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
	// A client's next request goes to another instance than its last one, as behind a load balancer.
	to := number
	var group sync.WaitGroup
	for _, v := range crowd {
		first := to
		to += len(v)
		group.Go(func() {
			for n, c := range v {
				pause(ctx, c.delay)
				answers <- s.send(ctx, first+n, key, body, c)
			}
		})
	}
	group.Wait()
	for n := range last {
		t := s.send(ctx, to+n, key, body, click{})
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

// send makes a request of one of the instances, when there is a user free to make it.
func (s *storm) send(ctx context.Context, to int, key, body string, c click) told {
	s.slots <- struct{}{}
	defer func() { <-s.slots }()
	defer s.sent.Add(1)
	return s.client.send(ctx, s.instances[to%len(s.instances)].base, key, body, c)
}
