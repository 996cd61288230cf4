package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"
)

// variant is one way to do what its group measures.
type variant struct {
	name string
	// prepare, if set, runs before every slice, unmeasured.
	prepare func(ctx context.Context) error
	// worker returns the operation of one of n concurrent callers.
	worker func(i, n int) func(ctx context.Context) error
}

// group is a set of variants that are compared with one another.
type group struct {
	name      string
	names     []string // of its variants
	baselines []string // the variants the others are compared with
	reads     bool     // and writes nothing
	setup     func(ctx context.Context, w *world, p *pools) ([]variant, error)
}

var groups = []group{fresh, replay, fronted, frontedReplay, overHTTP}

// cell is one variant at one number of callers.
type cell struct {
	Group      string           `json:"group"`
	Variant    string           `json:"variant"`
	Callers    int              `json:"callers"`
	OpsPerSec  float64          `json:"ops_per_second"`
	P50        float64          `json:"p50_ms"`
	P99        float64          `json:"p99_ms"`
	WALBytes   float64          `json:"wal_bytes_per_op"`
	RoundTrips float64          `json:"round_trips_per_op"`
	Allocs     float64          `json:"allocs_per_op"`
	Ops        int              `json:"ops"`
	ToBase     map[string]ratio `json:"ratio_to,omitempty"`

	rates, wal []float64 // by round
	latencies  []time.Duration
}

// sliceTime is how long a variant runs with c callers before the next one has its turn. Short, so that whatever else the
// machine does hits all variants alike; longer where an operation takes longer.
func sliceTime(c int) time.Duration { return time.Duration(100+6*c) * time.Millisecond }

// Every slice runs a little before it counts: connections that were idle find their memory and caches cold.
const (
	leadTime = 25 * time.Millisecond
	leadOps  = 3 // of each caller
)

// measureLevel runs all wanted variants of a group with c callers, in turns.
func measureLevel(ctx context.Context, w *world, g group, wanted func(variant) bool, c int, s settings) ([]cell, error) {
	p := &pools{world: w, size: c}
	defer p.close()
	variants, err := g.setup(ctx, w, p)
	if err != nil {
		return nil, err
	}
	variants = slices.DeleteFunc(variants, func(v variant) bool { return !wanted(v) })
	cells := make([]cell, len(variants))
	for i, v := range variants {
		cells[i] = cell{Group: g.name, Variant: v.name, Callers: c}
		// Statements get prepared and pages read before anything counts.
		if _, err := runSlice(ctx, w, v, c, sliceTime(c)); err != nil {
			return nil, err
		}
	}
	turns := max(1, int(s.duration/time.Duration(s.rounds)/sliceTime(c)))
	each := s.duration / time.Duration(s.rounds*turns)
	for range s.rounds {
		round := make([]sample, len(variants))
		for range turns {
			// Another order each time: whoever comes behind a heavy writer finds a busier disk.
			for _, i := range rand.Perm(len(variants)) {
				one, err := runSlice(ctx, w, variants[i], c, each)
				if err != nil {
					return nil, err
				}
				round[i].add(one)
			}
		}
		for i := range cells {
			cells[i].add(round[i], turns)
		}
	}
	for i := range cells {
		cells[i].finish()
	}
	return cells, nil
}

// sample is what one slice, or the slices of one round, came to.
type sample struct {
	rate      float64
	ops       int
	lead      int // operations of the lead time, which are in wal only
	wal       int64
	latencies []time.Duration
}

func (s *sample) add(o sample) {
	s.rate += o.rate
	s.ops += o.ops
	s.lead += o.lead
	s.wal += o.wal
	s.latencies = append(s.latencies, o.latencies...)
}

func runSlice(ctx context.Context, w *world, v variant, c int, d time.Duration) (s sample, err error) {
	if v.prepare != nil {
		if err := v.prepare(ctx); err != nil {
			return s, err
		}
	}
	workers := make([]struct {
		op        func(context.Context) error
		latencies []time.Duration
		lead      int           // operations that do not count
		began     time.Duration // end of the last of them
		took      time.Duration
		err       error
	}, c)
	for i := range workers {
		workers[i].op = v.worker(i, c)
		workers[i].latencies = make([]time.Duration, 0, 1<<12)
	}
	runtime.GC() // nobody pays for the garbage of the one before
	before, err := w.wal(ctx)
	if err != nil {
		return s, err
	}
	var running sync.WaitGroup
	begin := time.Now()
	for i := range workers {
		running.Go(func() {
			self := &workers[i]
			for leads := true; leads || self.took < self.began+d; {
				if self.err = self.op(ctx); self.err != nil {
					return
				}
				now := time.Since(begin)
				if leads {
					self.lead++
					self.began, self.took = now, now
					leads = now < leadTime || self.lead < leadOps
					continue
				}
				self.latencies = append(self.latencies, now-self.took)
				self.took = now
			}
		})
	}
	running.Wait()
	after, err := w.wal(ctx)
	if err != nil {
		return s, err
	}
	s.wal = after - before
	for i := range workers {
		err = errors.Join(err, workers[i].err)
		s.ops += len(workers[i].latencies)
		s.latencies = append(s.latencies, workers[i].latencies...)
		// Each over its own time: the last ones to finish do not make the others slower.
		s.rate += float64(len(workers[i].latencies)) / (workers[i].took - workers[i].began).Seconds()
		s.lead += workers[i].lead
	}
	return s, err
}

// add takes in one round.
func (c *cell) add(round sample, turns int) {
	c.rates = append(c.rates, round.rate/float64(turns))
	c.wal = append(c.wal, float64(round.wal)/float64(round.ops+round.lead))
	c.Ops += round.ops
	c.latencies = append(c.latencies, round.latencies...)
}

func (c *cell) finish() {
	slices.Sort(c.latencies)
	c.OpsPerSec, c.WALBytes = median(c.rates), median(c.wal)
	c.P50, c.P99 = milliseconds(percentile(c.latencies, 50)), milliseconds(percentile(c.latencies, 99))
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// compare fills in the ratios to those baselines that were run.
func compare(cells []cell, baselines []string) {
	for _, base := range baselines {
		b := slices.IndexFunc(cells, func(c cell) bool { return c.Variant == base })
		if b < 0 {
			continue
		}
		for i := range cells {
			if cells[i].ToBase == nil {
				cells[i].ToBase = map[string]ratio{}
			}
			cells[i].ToBase[base] = ratioOf(cells[i].rates, cells[b].rates)
		}
	}
}
