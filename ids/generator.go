package ids

import (
	"fmt"
	"sync"
	"time"
)

// DefaultMaxBack is how far the clock may be set back before a generator refuses.
const DefaultMaxBack = 100 * time.Millisecond

// standstill bounds the wait for a clock that does not move.
const standstill = time.Second

// Config configures a Generator. A zero field means its default.
type Config struct {
	// MaxBack is how far the clock may be behind the last ID. Up to that, Next goes on in the last millisecond and then waits;
	// behind it, it returns an error at once; -1: it never waits for a clock that was set back.
	// Default: 100 ms.
	MaxBack time.Duration
	// After is the last ID that this worker number has made before, if that is known: what was made in its millisecond, or
	// before it, cannot be made again, also when the clock was set back meanwhile.
	// Default: none.
	After ID
	// Clock tells the time, for tests.
	// Default: time.Now.
	Clock func() time.Time
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.MaxBack == 0 {
		d.MaxBack = DefaultMaxBack
	}
	if d.Clock == nil {
		d.Clock = time.Now
	}
	return d
}

func (c *Config) validate() error {
	switch {
	case c.MaxBack < -1 || c.MaxBack > time.Minute:
		return invalid("Config.MaxBack", "must be up to 1m, or -1 to wait never")
	case c.After < 0:
		return invalid("Config.After", "must be an ID")
	}
	return nil
}

// Generator makes the ids of one worker number. It is safe for concurrent use, makes up to 4,096 ids in a millisecond, and
// each is larger than the one before.
//
// Our own code, since none of the libraries looked at can be told what a worker number has made before, nor be given another
// number or none while it runs; and with a clock set back far, one goes on as if nothing was, and another sleeps it out.
type Generator struct {
	maxBack time.Duration
	clock   func() time.Time

	mu       sync.Mutex
	worker   int // -1: none
	last     int64
	sequence int   // of the last ID in the millisecond last
	limit    int64 // the last millisecond that ids may have
	// read is when the clock was compared with PostgreSQL's, which said told. Zero: it is believed as it is.
	read, told time.Time
}

// NewGenerator returns a generator for a worker number that the program has from its configuration. No two processes may have
// the same number, and a process that follows another with it must not be behind its clock: a Worker takes care of both. The
// error is an *idempotency.ConfigError.
func NewGenerator(worker int, cfg *Config) (*Generator, error) {
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if worker < 0 || worker > MaxWorker {
		return nil, invalid("worker", fmt.Sprintf("must be from 0 to %d, is %d", MaxWorker, worker))
	}
	g := newGenerator(&config)
	after := int64(0)
	if config.After > 0 {
		after = config.After.ms()
	}
	g.assign(worker, after, Epoch+maxTime)
	return g, nil
}

func newGenerator(config *Config) *Generator {
	return &Generator{maxBack: max(0, config.MaxBack), clock: config.Clock, worker: -1}
}

// assign gives the generator a worker number, for the milliseconds behind after and up to limit.
func (g *Generator) assign(worker int, after, limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.worker, g.last, g.limit = worker, after, limit
	g.sequence = maxSequence // the whole millisecond is used up
}

// compare says that PostgreSQL's clock has told a time between two readings of the own one: at the second it was that, or
// later by at most what lies between them. The time goes on as it was where it fits into that, so that a slow answer does not
// set it back; but it does not run away either.
func (g *Generator) compare(before, after, told time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.read.IsZero() {
		earliest, latest := told, told.Add(after.Sub(before))
		told = g.told.Add(after.Sub(g.read))
		if told.Before(earliest) {
			told = earliest
		}
		if told.After(latest) {
			told = latest
		}
	}
	g.read, g.told = after, told
}

// extend moves the limit forward.
func (g *Generator) extend(limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit = max(g.limit, limit)
}

// revoke takes the worker number away, and returns the last millisecond that it has used.
func (g *Generator) revoke() (last int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.worker = -1
	return g.last
}

func (g *Generator) now() time.Time {
	now := g.clock()
	if !g.read.IsZero() {
		now = g.told.Add(now.Sub(g.read)) // by the monotonic clock: setting the process's clock changes nothing
	}
	return now
}

// Next returns an ID. ErrClock (*ClockError): the clock was set back far, stands still, or is before Epoch. ErrNoWorker: of a
// Worker only. It may wait: for the next millisecond when 4,096 ids were made in this one, and up to MaxBack for a clock
// that was set back.
func (g *Generator) Next() (ID, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for waited := time.Duration(0); ; {
		if g.worker < 0 {
			return 0, ErrNoWorker
		}
		now := g.now()
		ms := now.UnixMilli()
		switch {
		case ms < Epoch || ms > Epoch+maxTime:
			return 0, &ClockError{Now: now}
		case ms > g.limit:
			return 0, ErrNoWorker // behind it ids may be somebody else's
		case ms > g.last:
			g.last, g.sequence = ms, 0
			return makeID(ms, g.worker, 0), nil
		case g.last-ms > g.maxBack.Milliseconds():
			return 0, &ClockError{Now: now, Behind: time.UnixMilli(g.last).Sub(now)}
		case g.sequence < maxSequence:
			// Also where the clock is a little behind: never an ID smaller than the one before.
			g.sequence++
			return makeID(g.last, g.worker, g.sequence), nil
		case waited > g.maxBack+standstill:
			return 0, &ClockError{Now: now}
		}
		pause := time.UnixMilli(g.last + 1).Sub(now)
		time.Sleep(pause) // whoever waits for the mutex would wait for the same
		waited += pause
	}
}
