package txn

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// MaxMany is the most requests that one call of WithIdempotencyMany takes.
const MaxMany = 500

// Outcome is what one request of WithIdempotencyMany came to.
type Outcome[T any] struct {
	Result[T]
	Err error // as WithIdempotency would return it
}

// WithIdempotencyMany is WithIdempotency for up to MaxMany requests in one transaction: all keys are acquired in one round
// trip, fn runs for each in the order of reqs, with its index and in a savepoint, and all outcomes are recorded and
// committed together. An error of fn takes back what it wrote for that index, and nothing else.
//
// Requests of one call with the same key are one: the first runs, the others get its outcome, or ErrMismatch if their
// payload is another one. It does not wait, whatever the operation's Wait says: a key that somebody else holds is
// ErrInProgress at once.
//
// Where the transaction does not get through as a whole (its COMMIT's answer is lost, the connection breaks, a deferred
// constraint refuses it, a serialization failure), every key of it is settled by itself, as WithIdempotency would. So fn
// may be entered again, and must not count on what it wrote for another index. That costs some milliseconds a key.
//
// When ctx ends, the keys that fn was not entered for get its error; what has run is still committed. A panic of fn
// rolls back the transaction it runs in and goes on.
//
// An error beside the outcomes means that nothing was done at all: ErrConfig (too many requests), ErrNested, ErrSchema,
// ErrReadOnly, ErrRestart, or the database's.
func WithIdempotencyMany[T any](ctx context.Context, r *Runner, reqs []idempotency.Request, fn func(context.Context, pgx.Tx, int) (T, error)) ([]Outcome[T], error) {
	if len(reqs) > MaxMany {
		return nil, &idempotency.ConfigError{Field: "requests", Rule: fmt.Sprintf("must be at most %d in one call, are %d: make several calls", MaxMany, len(reqs))}
	}
	outcomes, values := make([]Outcome[T], len(reqs)), make([]T, len(reqs))
	one := func(i int) func(context.Context, pgx.Tx) (T, error) {
		return func(ctx context.Context, tx pgx.Tx) (T, error) { return fn(ctx, tx, i) }
	}
	if r.within != nil {
		for i, req := range reqs {
			outcomes[i].Result, outcomes[i].Err = callWithin(ctx, r, req, one(i))
		}
		return outcomes, nil
	}
	if err := nested(ctx, r, r.pool, idempotency.Key{}); err != nil {
		return nil, err
	}
	ctx = ownWork(ctx)
	b := &batch{runner: r, first: map[idempotency.Key]*member{}}
	for i, req := range reqs {
		op, err := r.declared(req)
		if err != nil {
			outcomes[i].Err = err
			continue
		}
		b.add(i, newCall(ctx, r, op, req, &values[i], one(i)))
	}
	if err := b.do(ctx); err != nil {
		return nil, err
	}
	for _, m := range b.all {
		c := m.call
		out, err := c.end(m.step)
		if err == nil && !out.shared {
			c.publish(ctx, &out)
		}
		c.report(ctx, out, err)
		if err == nil {
			outcomes[m.index].Result, err = resultOf(c, out, values[m.index])
		}
		outcomes[m.index].Err = err
	}
	return outcomes, nil
}

// batch is one call of WithIdempotencyMany.
type batch struct {
	runner *Runner
	all    []*member // in the order of their requests
	first  map[idempotency.Key]*member
}

// member is one request of a batch, and what it has come to so far.
type member struct {
	call    *call
	index   int
	same    *member // the earlier one with the same key; nil: none
	found   *idempotency.Record
	attempt *attempt
	done    *idempotency.Completion // ran, and waits for the common COMMIT
	step    step
	state   memberState
}

type memberState int

const (
	memberOpen    memberState = iota
	memberAlone               // to be settled in a transaction of its own; step is how the common one ended
	memberSettled             // step is its end
)

func (m *member) settle(s step)   { m.step, m.state, m.done = s, memberSettled, nil }
func (m *member) setAside(s step) { m.step, m.state, m.done = s, memberAlone, nil }

func (b *batch) add(index int, c *call) {
	c.batched, c.asked = true, true
	m := &member{call: c, index: index, same: b.first[c.req.Key]}
	if m.same != nil && c.repeats() {
		m.same = nil
		m.setAside(step{kind: kindAgain})
	} else if m.same == nil {
		b.first[c.req.Key] = m
	}
	b.all = append(b.all, m)
}

// open are the members that still need the common transaction.
func (b *batch) open() (open []*member) {
	for _, m := range b.all {
		if m.same == nil && m.state == memberOpen {
			open = append(open, m)
		}
	}
	return open
}

func (b *batch) do(ctx context.Context) error {
	for _, m := range b.open() {
		if s, done := m.call.askNear(ctx); done {
			m.settle(s)
		}
	}
	if open := b.open(); len(open) > 0 {
		if err := b.runner.checkDatabase(ctx, b.runner.pool); err != nil {
			return err
		}
		if err := b.tryTogether(ctx, open); err != nil {
			return err
		}
	}
	b.settleAlone(ctx)
	for _, m := range b.all {
		if m.same != nil {
			m.settle(m.shared())
		}
	}
	return nil
}

// tryTogether begins the common transaction until it can be begun: until then nothing was done, and it may as well be
// given up.
func (b *batch) tryTogether(ctx context.Context, open []*member) error {
	lead := open[0].call
	backoff := pauses{next: restartPause, last: restartPauseMax}
	for {
		s := b.together(ctx, open)
		switch s.kind {
		case kindDone:
			return nil
		case kindRestart:
			if end, over := lead.again(ctx, &backoff, s.err); over {
				return end.err
			}
		default:
			return s.err
		}
	}
}

// settleAlone settles what the common transaction could not, one key after the other.
func (b *batch) settleAlone(ctx context.Context) {
	var away *step
	for _, m := range b.all {
		if m.state != memberAlone {
			continue
		}
		if away != nil && !m.call.unknown.running() {
			m.settle(failed(away.err)) // hundreds of keys would each try for a while
			continue
		}
		m.settle(m.call.alone(ctx, m.step))
		if m.call.away {
			away = &m.step
		}
	}
}

// alone goes on with a call whose common transaction ended as s says.
func (c *call) alone(ctx context.Context, s step) step {
	if s.kind == kindUnknown {
		found, err := c.resolve(ctx, s.err)
		if found.kind == kindDone && err == nil {
			return found
		}
		if err != nil {
			return c.unresolved(failed(err))
		}
		s.kind = kindAgain
	}
	if c.endedFence == 0 {
		c.final = nil // it may have been about what another key had written, and that is gone
	}
	return c.goOn(ctx, s)
}

// shared is the answer to a request whose key came earlier in the same call.
func (m *member) shared() step {
	c, first := m.call, m.same
	s := first.step
	record := first.found
	if s.kind == kindDone && s.err == nil {
		record = &s.out.record
	}
	if record != nil {
		if answer, done := c.answer(record.Clone()); done {
			answer.out.shared = true
			return answer
		}
	}
	if !c.req.Fingerprint.Matches(first.call.req.Fingerprint) {
		if s.kind == kindBusy || s.kind == kindUnknown {
			return step{kind: kindBusy, err: c.inProgress()} // nobody knows yet whose payload has the key
		}
		return c.rivalled(step{kind: kindBusy})
	}
	return step{kind: s.kind, err: s.err}
}
