package main

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// progress shows how far a storm is: a bar on a terminal, elsewhere a line for every quarter.
type progress struct {
	screen  *screen
	storm   *storm
	started time.Time
	quarter int
}

// showProgress shows it until the function it returns is called.
func showProgress(ctx context.Context, out *screen, s *storm) (stop func(finished bool)) {
	p := &progress{screen: out, storm: s, started: time.Now()}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				p.show(s.share(p.started))
			case <-ctx.Done():
				return
			}
		}
	}()
	return func(finished bool) {
		cancel()
		<-done
		if finished {
			p.show(1)
		}
		out.keep()
	}
}

func (p *progress) show(share float64) {
	const width = 40
	done := thousands(p.storm.sent.Load()) + " requests"
	if p.storm.duration > 0 {
		done += fmt.Sprintf(", %s of %s", time.Since(p.started).Round(time.Second), p.storm.duration)
	}
	if p.screen.terminal {
		full := int(share * width)
		p.screen.draw(fmt.Sprintf("Storm [%s%s] %3.0f %%  %s   ", strings.Repeat("#", full), strings.Repeat(".", width-full), share*100, done))
		return
	}
	if quarter := int(share * 4); quarter > p.quarter {
		p.quarter = quarter
		_, _ = fmt.Fprintf(p.screen, "Storm %3d %%  %s\n", quarter*25, done)
	}
}
