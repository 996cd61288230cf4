package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/pgonce/pgonce/internal/devstack"
)

// outage kills Redis when a third of the storm is over, and starts it again after another third, if the service has noticed.
type outage struct {
	node *devstack.RedisNode
	out  io.Writer
}

const (
	// longestOutage ends it earlier in a long storm.
	longestOutage = 5 * time.Second
	// recoveryGrace is how long the service may take to notice that Redis is there again.
	recoveryGrace = 10 * time.Second
	outageTick    = 5 * time.Millisecond
)

// strike plays the outage; over is closed when the storm is over. It returns when every instance asks Redis again.
func (o *outage) strike(ctx context.Context, s *storm, over <-chan struct{}) error {
	started := time.Now()
	third := func(n float64) func() bool { return func() bool { return s.share(started) >= n/3 } }
	await(ctx, over, third(1))
	select {
	case <-ctx.Done():
		return nil // the storm says so
	case <-over:
		return errors.New("kill Redis in mid-storm: the storm was over before: play a longer one, with more -requests")
	default:
	}
	if err := o.node.Kill(); err != nil {
		return err
	}
	_, _ = fmt.Fprintln(o.out, "Redis was killed.")
	killed := time.Now()
	await(ctx, over, func() bool {
		noticed := slices.ContainsFunc(s.instances, func(i *instance) bool { return i.redis.Degraded() })
		return time.Since(killed) >= longestOutage || noticed && third(2)()
	})
	if ctx.Err() != nil {
		return nil
	}
	if err := o.node.Start(ctx); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(o.out, "Redis was started again, after %s.\n", time.Since(killed).Round(100*time.Millisecond))
	bounded, cancel := context.WithTimeout(ctx, recoveryGrace)
	defer cancel()
	for n, i := range s.instances {
		await(bounded, nil, func() bool { return !i.redis.Degraded() })
		if i.redis.Degraded() && ctx.Err() == nil {
			return fmt.Errorf("%s does not ask Redis again, %s after its start", who(n+1, len(s.instances)), recoveryGrace)
		}
	}
	return nil
}

// await returns when it is so, or when there is no more to wait for.
func await(ctx context.Context, over <-chan struct{}, so func() bool) {
	ticker := time.NewTicker(outageTick)
	defer ticker.Stop()
	for !so() {
		select {
		case <-ticker.C:
		case <-over:
			return
		case <-ctx.Done():
			return
		}
	}
}
