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
	store   *idempotency.Store // the runner's, or the same without named statements
	op      *operation
	req     idempotency.Request
	body    func(context.Context, pgx.Tx) (payload, error)
	started stopwatch
	traceID string

	tokens   []idempotency.AttemptToken // of every attempt that may have reached COMMIT
	runs     int                        // how often the function was entered
	inHand   idempotency.AttemptToken   // of the attempt whose value is still in memory
	restarts int
	final    *failure // set: no more running, this failure is to be recorded

	lease   *Lease // leased mode: what the foreign function is given
	foreign func(context.Context, *Lease) error

	batched bool // one of WithIdempotencyMany's: nobody else's attempt is waited for
	away    bool // the last attempt found no connection

	policy   idempotency.InForce // when the call began
	strategy idempotency.Strategy
	wait     time.Duration
	noLocal  bool
	without  bool                // an attempt may have committed without a record
	wouldBe  idempotency.WouldBe // of the last such attempt
	unlocked bool                // it had no lock: nobody can prove that it will not commit any more
	proven   int                 // of tokens: those before are accounted for

	endedFence int64 // of the attempt whose function ended its transaction; 0: none did

	fronted bool      // the fronts are asked and told
	mark    *heldMark // nil: none is held
	passed  bool      // the far front was passed over
	rival   bool      // the far front says that another payload has the key
	asked   bool      // PostgreSQL was
	entered stopwatch // the function, for the last time
	epoch   string    // of the session that read or committed last, or of the front's answer

	waits   bool      // counted as a waiter
	busy    stopwatch // since when the key is held by somebody else
	ghost   bool      // a connection was lost: the holder may be this call's own past
	unknown stopwatch // since when a COMMIT of this call is unresolved
	ending  verdictKind
}

// payload is an encoded result.
type payload struct {
	data       []byte
	resultType string
}

// outcome is a committed record. own: an attempt of this call committed it. fresh: in the latest run.
type outcome struct {
	record     idempotency.Record
	own, fresh bool
	shared     bool
	from       idempotency.Front // that gave it; nil: PostgreSQL, or a call that this one was merged with
}

// verdictKind says how an attempt, and so a call, ended. It is decided where things happen and never by looking into an
// error: what the function returns may well wrap our own sentinels, from another runner.
type verdictKind int

const (
	kindDone     verdictKind = iota // an outcome
	kindAnswered                    // an answer about the key, from its record: mismatch, result gone, ...
	kindRefused                     // the key may not be used: nothing was ever done with it
	kindFailed                      // the function's error or the database's; rolled back
	kindBusy                        // the key is held by another attempt
	kindAgain                       // look at the key again
	kindRestart                     // run the whole transaction again
	kindUnknown                     // COMMIT was sent and its answer never came
)

// step is what one attempt came to.
type step struct {
	kind verdictKind
	out  outcome
	err  error
}

func restart(err error) step {
	return step{kind: kindRestart, err: fmt.Errorf("%w: %w", idempotency.ErrRestart, err)}
}
func failed(err error) step { return step{kind: kindFailed, err: err} }

// do runs the call to an outcome or an error.
func (c *call) do(ctx context.Context) (outcome, error) {
	if !c.enforced() { // nobody is merged with it, and no front asked
		return c.end(c.tries(ctx))
	}
	if s, done := c.askNear(ctx); done {
		return c.end(s)
	}
	for {
		own, leads := c.runner.flights.join(c.req.Key, c.req.Fingerprint)
		if leads {
			return c.lead(ctx, own)
		}
		if s, done := c.follow(ctx, own); done {
			return c.end(s)
		}
	}
}

// end remembers how the call ended.
func (c *call) end(s step) (outcome, error) {
	c.ending = s.kind
	return s.out, s.err
}

// lead makes this call the one of its key that leaves the process.
func (c *call) lead(ctx context.Context, own *flight) (out outcome, err error) {
	committed := false
	// Deferred: a panic or Goexit of the function must not leave followers waiting for ever.
	defer func() {
		c.dropMark(ctx)
		c.runner.flights.land(c.req.Key, own, out.record, committed)
	}()
	// Again: the leader before this one may have landed between the first look and now.
	s, done := c.askNear(ctx)
	if !done {
		// In a quiet operation the far front is nearly always asked in vain, which costs a new order a quarter of its throughput.
		if c.passed = c.op.fresh.quiet() && !c.req.Retry; !c.passed {
			s, done = c.askFar(ctx)
		}
	}
	switch {
	case done:
		c.leaveWait()
	case c.foreign != nil:
		s = c.leaseTries(ctx)
	default:
		s = c.tries(ctx)
	}
	out, err = c.end(s)
	if committed = err == nil; committed {
		c.publish(ctx, &out)
	}
	return out, err
}

// follow waits for the leader of the key. done is false if the caller should try for itself.
func (c *call) follow(ctx context.Context, leader *flight) (s step, done bool) {
	if !c.req.Fingerprint.Matches(leader.fingerprint) {
		return c.rivalled(c.lastLook(ctx)), true
	}
	if !c.enterWait() {
		return c.lastLook(ctx), true
	}
	landed, err := leader.wait(ctx, c.wait-c.started.elapsed())
	c.leaveWait()
	switch {
	case err != nil:
		return step{kind: kindBusy, err: errors.Join(c.inProgress(), err)}, true
	case !landed:
		return c.lastLook(ctx), true
	case leader.record == nil:
		return step{}, false
	}
	s, done = c.answer(leader.record.Clone())
	s.out.shared = true
	return s, done
}

// rivalled tells a caller at once that another payload has the key, instead of "in progress". Only where PostgreSQL does
// not know better: the other call may itself be the one that will be refused.
func (c *call) rivalled(s step) step {
	if s.kind != kindBusy {
		return s
	}
	return step{kind: kindAnswered, err: &idempotency.MismatchError{Key: c.req.Key}}
}

// lookTimeout bounds the last look: a full pool must not make a waiter wait on.
const lookTimeout = 250 * time.Millisecond

// lastLook asks PostgreSQL once more before a waiter is told "in progress".
func (c *call) lastLook(ctx context.Context) step {
	bounded, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	if s, done, err := c.lookup(bounded); err == nil && done {
		return s
	}
	return step{kind: kindBusy, err: c.inProgress()}
}

// lookup reads the record without a transaction. done is false where the key must be acquired to know more.
func (c *call) lookup(ctx context.Context) (s step, done bool, err error) {
	conn, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		return step{}, false, err
	}
	if err := c.learnEpoch(ctx, conn.Conn()); err != nil {
		conn.Release()
		return step{}, false, err
	}
	r, found, err := c.store.Lookup(ctx, conn.Conn(), c.req.Key)
	conn.Release()
	if err != nil || !found {
		return step{}, false, err
	}
	s, done = c.answer(r)
	return s, done, nil
}

// answer turns a final record into the caller's answer.
func (c *call) answer(r idempotency.Record) (s step, done bool) {
	v, ok := r.Verdict(c.req.Fingerprint)
	if !ok {
		return step{}, false
	}
	return c.settle(v, r), true
}

// settle gives the answer of a verdict that ends the call.
func (c *call) settle(v idempotency.Verdict, r idempotency.Record) step {
	answered := func(err error) step { return step{kind: kindAnswered, err: err} }
	switch v {
	case idempotency.VerdictReplay:
		return step{out: outcome{record: r}}
	case idempotency.VerdictOwn:
		return step{out: outcome{record: r, own: true}}
	case idempotency.VerdictMismatch:
		return answered(&idempotency.MismatchError{Key: c.req.Key, CreatedAt: r.CreatedAt})
	case idempotency.VerdictGone:
		if r.Fence == 0 {
			return answered(fmt.Errorf("%w: executed without a record at %s, as a policy said then; a person must reconcile it (pgonce policy bypassed)",
				idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339)))
		}
		return answered(fmt.Errorf("%w: completed at %s", idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339)))
	case idempotency.VerdictWrongMode:
		return answered(idempotency.ErrWrongMode)
	case idempotency.VerdictNewer:
		return answered(idempotency.ErrNewerRecord)
	case idempotency.VerdictNotIssued:
		return step{kind: kindRefused, err: idempotency.ErrNotIssued}
	case idempotency.VerdictManual:
		return answered(fmt.Errorf("%w: its lease ended at %s", idempotency.ErrManual, r.LeaseExpiresAt.Format(time.RFC3339)))
	}
	return failed(fmt.Errorf("txn: unexpected verdict %q", v))
}

// inProgress is the answer to a caller that will not wait any longer. RetryAfter is at least 1 s, HTTP's unit.
func (c *call) inProgress() error {
	return &idempotency.InProgressError{Key: c.req.Key, RetryAfter: max(time.Second, min(c.wait, 5*time.Second))}
}

// enterWait counts the call as a waiter, or refuses it.
func (c *call) enterWait() bool {
	if c.waits {
		return true
	}
	if c.runner.waiters.Add(1) > int64(c.runner.config.MaxWaiters) {
		c.runner.waiters.Add(-1)
		return false
	}
	c.waits = true
	return true
}

func (c *call) leaveWait() {
	if c.waits {
		c.waits = false
		c.runner.waiters.Add(-1)
	}
}

func (c *call) emit(ctx context.Context, e idempotency.Event) { c.runner.config.OnEvent(ctx, e) }
