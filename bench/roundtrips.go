package main

import (
	"context"
	"net"
	"runtime"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// counted is what can be counted of one operation.
type counted struct{ trips, allocs float64 }

// countApart counts what an operation of each variant costs on the network, where a read behind a write is a round trip, and in
// allocations of this program, apart from the measurement.
func countApart(ctx context.Context, w *world, g group, wanted func(variant) bool) (map[string]counted, error) {
	var trips atomic.Int64
	count := func(cfg *pgxpool.Config) {
		dial := cfg.ConnConfig.DialFunc
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &countingConn{Conn: conn, trips: &trips}, err
		}
	}
	p := &pools{world: w, size: 1, configure: []func(*pgxpool.Config){count}}
	defer p.close()
	variants, err := g.setup(ctx, w, p)
	if err != nil {
		return nil, err
	}
	counts := map[string]counted{}
	for _, v := range variants {
		if !wanted(v) {
			continue
		}
		if v.prepare != nil {
			if err := v.prepare(ctx); err != nil {
				return nil, err
			}
		}
		const warm, measured = 50, 100
		op := v.worker(0, 1)
		var before, after runtime.MemStats
		for i := range warm + measured {
			if i == warm {
				runtime.ReadMemStats(&before)
				trips.Store(0)
			}
			if err := op(ctx); err != nil {
				return nil, err
			}
		}
		n := float64(trips.Load())
		runtime.ReadMemStats(&after)
		counts[v.name] = counted{trips: n / measured, allocs: float64(after.Mallocs-before.Mallocs) / measured}
	}
	return counts, nil
}

type countingConn struct {
	net.Conn
	trips *atomic.Int64
	wrote atomic.Bool
}

func (c *countingConn) Write(b []byte) (int, error) {
	c.wrote.Store(true)
	return c.Conn.Write(b)
}

func (c *countingConn) Read(b []byte) (int, error) {
	if c.wrote.Swap(false) {
		c.trips.Add(1)
	}
	return c.Conn.Read(b)
}
