package txn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// call is one call of WithIdempotency: what it wants, and what its tries have come to so far.
type call struct {
	runner  *Runner
	op      *operation
	req     idempotency.Request
	body    func(context.Context, pgx.Tx) (payload, error)
	started stopwatch
	traceID string

	tokens   []idempotency.AttemptToken // of every attempt that may have reached COMMIT
	runs     int                        // how often the function was entered
	restarts int
	final    *failure // set: no more running, this failure is to be recorded

	busy    stopwatch // since when the key is held by somebody else
	ghost   bool      // a connection was lost: the holder may be this call's own past
	unknown stopwatch // since when a COMMIT of this call is unresolved
}

// payload is an encoded result.
type payload struct {
	data       []byte
	resultType string
}

// outcome is a committed record. own: an attempt of this call committed it. fresh: its value is still in memory.
type outcome struct {
	record     idempotency.Record
	own, fresh bool
	shared     bool
}

// Sentinels between an attempt and the loop around it.
var (
	errBusy  = errors.New("txn: key is held by another attempt")
	errAgain = errors.New("txn: look at the key again")
)

// do runs the call to an outcome or an error.
func (c *call) do(ctx context.Context) (outcome, error) {
	for {
		own, leads := c.runner.flights.join(c.req.Key)
		if leads {
			return c.lead(ctx, own)
		}
		out, landed, err := c.follow(ctx, own)
		if err != nil || landed {
			return out, err
		}
	}
}

// lead makes this call the one of its key that talks to PostgreSQL.
func (c *call) lead(ctx context.Context, own *flight) (out outcome, err error) {
	committed := false
	// Deferred: a panic or Goexit of the function must not leave followers waiting for ever.
	defer func() { c.runner.flights.land(c.req.Key, own, out.record, committed) }()
	out, err = c.tries(ctx)
	committed = err == nil
	return out, err
}

// follow waits for the leader of the key. done is false if the caller should try for itself.
func (c *call) follow(ctx context.Context, leader *flight) (out outcome, done bool, err error) {
	if !c.enterWait() {
		return c.lastLook(ctx)
	}
	landed, err := leader.wait(ctx, c.op.Wait-c.started.elapsed())
	c.runner.waiters.Add(-1)
	switch {
	case err != nil:
		return outcome{}, true, errors.Join(c.inProgress(), err)
	case !landed:
		return c.lastLook(ctx)
	case !leader.shared:
		return outcome{}, false, nil
	}
	record := leader.record.Clone()
	out, done, err = c.answer(record)
	out.shared = true
	return out, done, err
}

// lastLook asks PostgreSQL once more before a waiter is told "in progress".
func (c *call) lastLook(ctx context.Context) (outcome, bool, error) {
	out, done, err := c.lookup(ctx)
	if err != nil || done {
		return out, true, err
	}
	return outcome{}, true, c.inProgress()
}

// lookup reads the record without a transaction. done is false where the key must be acquired to know more.
func (c *call) lookup(ctx context.Context) (out outcome, done bool, err error) {
	r, found, err := c.runner.store.Lookup(ctx, c.runner.pool, c.req.Key)
	if err != nil || !found {
		return outcome{}, err != nil, err
	}
	return c.answer(r)
}

// answer turns a final record into the caller's answer.
func (c *call) answer(r idempotency.Record) (out outcome, done bool, err error) {
	v, ok := r.Verdict(c.req.Fingerprint)
	if !ok {
		return outcome{}, false, nil
	}
	out, err = c.settle(v, r)
	return out, true, err
}

// settle gives the answer of a verdict that ends the call.
func (c *call) settle(v idempotency.Verdict, r idempotency.Record) (outcome, error) {
	switch v {
	case idempotency.VerdictReplay:
		return outcome{record: r}, nil
	case idempotency.VerdictOwn:
		return outcome{record: r, own: true}, nil
	case idempotency.VerdictMismatch:
		return outcome{}, &idempotency.MismatchError{Key: c.req.Key, CreatedAt: r.CreatedAt}
	case idempotency.VerdictGone:
		return outcome{}, fmt.Errorf("%w: completed at %s", idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339))
	case idempotency.VerdictWrongMode:
		return outcome{}, idempotency.ErrWrongMode
	case idempotency.VerdictNewer:
		return outcome{}, idempotency.ErrNewerRecord
	}
	return outcome{}, fmt.Errorf("txn: unexpected verdict %q", v)
}

// inProgress is the answer to a caller that will not wait any longer. RetryAfter is at least 1 s, HTTP's unit.
func (c *call) inProgress() error {
	return &idempotency.InProgressError{Key: c.req.Key, RetryAfter: max(time.Second, min(c.op.Wait, 5*time.Second))}
}

// enterWait counts a waiter, or refuses it.
func (c *call) enterWait() bool {
	if c.runner.waiters.Add(1) > int64(c.runner.config.MaxWaiters) {
		c.runner.waiters.Add(-1)
		return false
	}
	return true
}

func (c *call) emit(ctx context.Context, e idempotency.Event) { c.runner.config.OnEvent(ctx, e) }
