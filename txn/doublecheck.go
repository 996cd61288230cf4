package txn

import (
	"context"
	"sync"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// doubleCheck compares what near fronts answer with PostgreSQL, in the background, while the far front is degraded: nobody
// else would notice then that an entry is no longer what PostgreSQL has.
type doubleCheck struct {
	runner *Runner
	begin  sync.Once
	work   chan doubted
	mu     sync.Mutex
	recent map[idempotency.AttemptToken]stopwatch // when an outcome was checked last

	ctx    context.Context //nolint:containedctx // the life of the workers, ended by close
	cancel context.CancelFunc
	group  sync.WaitGroup
}

type doubted struct {
	front idempotency.Front
	ask   idempotency.Ask
	token idempotency.AttemptToken
}

const (
	doubleCheckers     = 2
	doubleCheckQueue   = 256 // more are not checked: there will be another hit
	doubleCheckTries   = 3
	doubleCheckTimeout = 500 * time.Millisecond
	doubleCheckPause   = 2 * time.Second // between two checks of one outcome
	doubleCheckRecent  = 4096
)

func newDoubleCheck(r *Runner) *doubleCheck {
	d := &doubleCheck{runner: r, work: make(chan doubted, doubleCheckQueue), recent: map[idempotency.AttemptToken]stopwatch{}}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// offer has a near front's answer checked, if there is a reason to.
func (d *doubleCheck) offer(front idempotency.Front, ask idempotency.Ask, r *idempotency.Record) {
	far, tells := d.runner.fronts.far.(interface{ Degraded() bool })
	if !tells || !far.Degraded() || !d.due(r.AttemptToken) {
		return
	}
	d.begin.Do(func() {
		for range doubleCheckers {
			d.group.Go(d.run)
		}
	})
	select {
	case d.work <- doubted{front, ask, r.AttemptToken}:
	default:
	}
}

// due reports whether an outcome was not checked a moment ago: PostgreSQL has more to do than usual.
func (d *doubleCheck) due(token idempotency.AttemptToken) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if last, checked := d.recent[token]; checked && last.elapsed() < doubleCheckPause {
		return false
	}
	if len(d.recent) >= doubleCheckRecent {
		clear(d.recent)
	}
	d.recent[token] = startStopwatch()
	return true
}

func (d *doubleCheck) close() {
	d.begin.Do(func() {}) // never begins any more
	d.cancel()
	d.group.Wait()
}

func (d *doubleCheck) run() {
	for {
		select {
		case <-d.ctx.Done():
			return
		case one := <-d.work:
			d.check(one)
		}
	}
}

func (d *doubleCheck) check(one doubted) {
	for range doubleCheckTries {
		same, err := d.same(one)
		if err != nil {
			continue
		}
		if !same {
			d.evict(one)
		}
		return
	}
}

// evict takes the entry away that was doubted. Another one may be there by now.
func (d *doubleCheck) evict(one doubted) {
	r, found, err := one.front.Lookup(d.ctx, one.ask)
	if err != nil || !found || r.AttemptToken != one.token || one.front.Evict(d.ctx, one.ask.Key) != nil {
		return
	}
	d.runner.config.OnEvent(d.ctx, idempotency.FrontMismatch{Front: one.front.Name(), Key: one.ask.Key})
}

func (d *doubleCheck) same(one doubted) (bool, error) {
	ctx, cancel := context.WithTimeout(d.ctx, doubleCheckTimeout)
	defer cancel()
	conn, err := d.runner.pool.Acquire(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Release()
	r, found, err := d.runner.store.Lookup(ctx, conn.Conn(), one.ask.Key)
	return found && !r.Expired && r.AttemptToken == one.token, err
}
