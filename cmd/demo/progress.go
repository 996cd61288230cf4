package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// progress shows how far a storm is: a bar on a terminal, elsewhere a line for every quarter.
type progress struct {
	out      io.Writer
	terminal bool
	storm    *storm
	started  time.Time
	quarter  int
}

// isTerminal reports whether a bar can be drawn there.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// showProgress shows it until the function it returns is called.
func showProgress(ctx context.Context, out io.Writer, s *storm) (stop func(finished bool)) {
	p := &progress{out: out, terminal: isTerminal(out), storm: s, started: time.Now()}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				p.show(p.share())
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
		if p.terminal {
			_, _ = fmt.Fprintln(out)
		}
	}
}

// share is how much of the storm is over, from 0 to 1.
func (p *progress) share() float64 {
	if p.storm.duration > 0 {
		return min(float64(time.Since(p.started))/float64(p.storm.duration), 1)
	}
	return float64(p.storm.sent.Load()) / float64(p.storm.requests)
}

func (p *progress) show(share float64) {
	const width = 40
	done := thousands(p.storm.sent.Load()) + " requests"
	if p.storm.duration > 0 {
		done += fmt.Sprintf(", %s of %s", time.Since(p.started).Round(time.Second), p.storm.duration)
	}
	if p.terminal {
		full := int(share * width)
		_, _ = fmt.Fprintf(p.out, "\rStorm [%s%s] %3.0f %%  %s   ", strings.Repeat("#", full), strings.Repeat(".", width-full), share*100, done)
		return
	}
	if quarter := int(share * 4); quarter > p.quarter {
		p.quarter = quarter
		_, _ = fmt.Fprintf(p.out, "Storm %3d %%  %s\n", quarter*25, done)
	}
}
