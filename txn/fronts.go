package txn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// fronts is what stands before PostgreSQL: near ones, asked by every call, and a far one, asked by the one call of a key
// that goes on to PostgreSQL.
type fronts struct {
	near    []idempotency.Front
	far     idempotency.Front // nil: none
	epochs  *epochWatch
	doubles *doubleCheck
}

func newFronts(all []idempotency.Front) (fronts, error) {
	var f fronts
	for _, front := range all {
		switch {
		case front == nil:
			return f, &idempotency.ConfigError{Field: "Config.Fronts", Rule: "must not hold nil"}
		case front.Near() && f.far != nil:
			return f, &idempotency.ConfigError{Field: "Config.Fronts", Rule: "must name the nearest first: the local front before Redis"}
		case front.Near():
			f.near = append(f.near, front)
		case f.far != nil:
			return f, &idempotency.ConfigError{Field: "Config.Fronts", Rule: fmt.Sprintf("must hold one front outside of the process, has %s and %s", f.far.Name(), front.Name())}
		default:
			f.far = front
		}
	}
	return f, nil
}

func (f *fronts) configured() bool { return f.far != nil || len(f.near) > 0 }

// ask is the call's question to the fronts. known is false where they are not to be asked.
func (c *call) ask() (ask idempotency.Ask, known bool) {
	if !c.fronted {
		return idempotency.Ask{}, false
	}
	epoch, _, known := c.runner.fronts.epochs.current()
	return idempotency.Ask{Key: c.req.Key, Fingerprint: c.req.Fingerprint, Epoch: epoch}, known
}

// askNear looks into the fronts of this process.
func (c *call) askNear(ctx context.Context) (s step, done bool) {
	if c.noLocal || len(c.runner.fronts.near) == 0 {
		return step{}, false
	}
	ask, known := c.ask()
	if !known {
		return step{}, false
	}
	for _, front := range c.runner.fronts.near {
		r, found, err := front.Lookup(ctx, ask)
		if s, done = c.fromFront(front, ask, r, found, err); done {
			c.runner.fronts.doubles.offer(front, ask, &s.out.record)
			return s, true
		}
	}
	return step{}, false
}

// askFar marks the key as running in the front outside of this process, or gives the answer that is there, or waits for
// whoever runs it. Without an answer PostgreSQL decides.
func (c *call) askFar(ctx context.Context) (s step, done bool) {
	front := c.runner.fronts.far
	if front == nil {
		return step{}, false
	}
	mark := idempotency.NewAttemptToken()
	for {
		ask, known := c.ask()
		if !known {
			return step{}, false
		}
		life := c.op.latency.markLife()
		r, found, err := c.begin(ctx, front, ask, mark, life)
		if s, done = c.fromFront(front, ask, r, found, err); done {
			return s, true
		}
		switch {
		case err == nil && !found:
			c.holdMark(context.WithoutCancel(ctx), mark, life)
			return step{}, false
		case errors.Is(err, idempotency.ErrMismatch):
			// A mark says that somebody asks, not that it runs or is right: PostgreSQL knows both.
			c.rival = true
			return step{}, false
		case err != nil && !errors.Is(err, idempotency.ErrInProgress):
			front.End(ctx, c.req.Key, mark) // the answer may have been lost, and the mark be there
			return step{}, false
		case err == nil || !c.enterWait():
			return step{}, false
		}
		left := c.wait - c.started.elapsed()
		if left <= 0 {
			return step{}, false
		}
		bounded, cancel := context.WithTimeout(ctx, left)
		err = front.Wait(bounded, c.req.Key)
		cancel()
		switch {
		case ctx.Err() != nil:
			return step{kind: kindBusy, err: errors.Join(c.inProgress(), context.Cause(ctx))}, true
		case err != nil:
			return step{}, false
		}
	}
}

// begin spends at most half of the caller's time: PostgreSQL needs some of it, and a front that hangs must not take all.
func (c *call) begin(ctx context.Context, front idempotency.Front, ask idempotency.Ask, mark idempotency.AttemptToken, life time.Duration) (idempotency.Record, bool, error) {
	if left, limited := timeLeft(ctx); limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, left/2)
		defer cancel()
	}
	return front.Begin(ctx, ask, mark, life)
}

// fromFront is the answer that a front gave, if it gave one.
func (c *call) fromFront(front idempotency.Front, ask idempotency.Ask, r idempotency.Record, found bool, err error) (s step, done bool) {
	var mismatch *idempotency.MismatchError
	switch {
	case errors.As(err, &mismatch) && !mismatch.CreatedAt.IsZero(): // of a record
		return step{kind: kindAnswered, err: err}, true
	case err != nil || !found:
		return step{}, false
	}
	// Times to live are counted by other clocks, which may be set back.
	if _, now, _ := c.runner.fronts.epochs.current(); r.Life(now) <= 0 {
		return step{}, false
	}
	if s, done = c.answer(r); done {
		s.out.from, c.epoch = front, ask.Epoch
	}
	return s, done
}

// heldMark is a call's own mark in the far front, renewed until it is released.
type heldMark struct {
	mu    sync.Mutex
	token idempotency.AttemptToken
	timer *time.Timer // nil: released
}

func (c *call) holdMark(ctx context.Context, token idempotency.AttemptToken, life time.Duration) {
	h, front, key := &heldMark{token: token}, c.runner.fronts.far, c.req.Key
	every := life / 3 // two tries before it ends
	h.mu.Lock()
	defer h.mu.Unlock()
	h.timer = time.AfterFunc(every, func() {
		began := startStopwatch()
		// A front that fails here says so itself, and the mark ends by itself.
		_ = front.Renew(ctx, key, token, life)
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.timer != nil {
			h.timer.Reset(max(0, every-began.elapsed())) // what a try took must not add up
		}
	})
	c.mark = h
}

// releaseMark stops the renewal and returns the mark, which somebody must end now.
func (c *call) releaseMark() idempotency.AttemptToken {
	h := c.mark
	if h == nil {
		return idempotency.AttemptToken{}
	}
	c.mark = nil
	h.mu.Lock()
	defer h.mu.Unlock()
	h.timer.Stop()
	h.timer = nil
	return h.token
}

// publish gives a committed outcome to the fronts that do not have it, and ends the call's mark.
func (c *call) publish(ctx context.Context, out *outcome) {
	if !c.fronted {
		return
	}
	entry := idempotency.Entry{Record: out.record, Epoch: c.epoch, Mark: c.releaseMark()}
	_, now, known := c.runner.fronts.epochs.current()
	entry.Life = out.record.Life(now)
	if !known || c.epoch == "" || entry.Life <= 0 || !out.record.Keepable() {
		c.endMark(ctx, entry.Mark)
		return
	}
	if !c.noLocal {
		for _, front := range c.runner.fronts.near {
			if front != out.from {
				front.Publish(ctx, entry)
			}
		}
	}
	if far := c.runner.fronts.far; far != nil && far != out.from {
		far.Publish(ctx, entry)
	}
}

// dropMark ends the call's mark without an outcome.
func (c *call) dropMark(ctx context.Context) { c.endMark(ctx, c.releaseMark()) }

func (c *call) endMark(ctx context.Context, mark idempotency.AttemptToken) {
	if mark != (idempotency.AttemptToken{}) {
		c.runner.fronts.far.End(ctx, c.req.Key, mark)
	}
}
