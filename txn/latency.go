package txn

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// latency is how long an operation's executions take: the 99th percentile of the last minutes, in milliseconds.
type latency struct {
	life atomic.Int64 // of a mark, in ns; 0: nothing is known yet

	mu       sync.Mutex
	recent   *hdrhistogram.WindowedHistogram
	rotated  stopwatch
	computed stopwatch
}

// A mark lives for the time of a request and is renewed by longer ones: what a dead process leaves behind ends soon. Until
// a time is known it is that of a slow one.
const (
	firstMarkLife = 3 * time.Second
	extraMarkLife = 500 * time.Millisecond
	maxMarkLife   = 60 * time.Second

	latencyWindows  = 2
	latencyWindow   = time.Minute
	latencyComputed = 250 * time.Millisecond // how often, at most: it merges the windows
)

// add is told of one execution.
func (l *latency) add(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.recent == nil:
		l.recent = hdrhistogram.NewWindowed(latencyWindows, 1, maxMarkLife.Milliseconds(), 3)
		l.rotated = startStopwatch()
	case l.rotated.elapsed() > latencyWindow:
		l.recent.Rotate()
		l.rotated = startStopwatch()
	}
	// Longer than the histogram goes is as long as it goes.
	_ = l.recent.Current.RecordValue(min(max(took.Milliseconds(), 1), maxMarkLife.Milliseconds()))
	if l.computed.running() && l.computed.elapsed() < latencyComputed {
		return
	}
	l.computed = startStopwatch()
	p99 := time.Duration(l.recent.Merge().ValueAtQuantile(99)) * time.Millisecond
	l.life.Store(int64(min(p99*3/2+extraMarkLife, maxMarkLife)))
}

// markLife is how long a mark lives that is not renewed.
func (l *latency) markLife() time.Duration {
	if life := l.life.Load(); life > 0 {
		return time.Duration(life)
	}
	return firstMarkLife
}
