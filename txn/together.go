package txn

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// together is one try of the common transaction. kindDone says that it was begun: every member is settled or set aside.
// Otherwise nothing was done.
func (b *batch) together(ctx context.Context, open []*member) step {
	lead, s := open[0].call.connect(ctx)
	if lead == nil {
		return s
	}
	over := false
	// Deferred, and run behind release: a panic or Goexit of a function behind its own COMMIT ended the transaction of those
	// before it too.
	defer func() {
		if !over && b.transactionEnded(open) {
			b.settleAlone(context.WithoutCancel(ctx))
		}
	}()
	defer lead.release(ctx)
	if err := b.acquire(ctx, lead, open); err != nil {
		over = true
		s := lead.acquireFailed(ctx, err)
		for _, m := range open {
			m.call.ghost, m.call.store = lead.call.ghost, lead.call.store
		}
		return s
	}
	lead.open = true
	b.run(ctx, lead, open)
	if done := ran(open); len(done) > 0 {
		b.commit(ctx, lead, done)
	}
	over = true
	return step{}
}

// acquire asks for all keys, and settles those that must not run.
func (b *batch) acquire(ctx context.Context, lead *attempt, open []*member) (err error) {
	learner := lead.call
	keys := make([]idempotency.Key, len(open))
	for i, m := range open {
		keys[i] = m.call.req.Key
		if m.call.fronted {
			learner = m.call
		}
	}
	conn := lead.pooled.Conn()
	if lead.guard, err = learner.makeReady(ctx, conn); err != nil {
		return err
	}
	acquired, err := lead.call.store.AcquireMany(ctx, conn, keys, b.runner.config.Isolation)
	if err != nil {
		return err
	}
	for i, m := range open {
		c := m.call
		c.epoch = learner.epoch
		m.attempt = &attempt{call: c, pooled: lead.pooled, guard: lead.guard}
		acquired[i].RequireIssued = c.op.RequireIssued && c.runs == 0
		m.attempt.acquired = acquired[i]
		if acquired[i].Found {
			m.found = &acquired[i].Record
		}
		v, err := m.attempt.byPolicy(ctx, conn, acquired[i].Verdict(c.req.Fingerprint))
		if err != nil {
			lead.open = true // to be rolled back
			return err
		}
		switch {
		case v == idempotency.VerdictRun:
		case v == idempotency.VerdictInProgress && c.ghost:
			m.setAside(step{kind: kindBusy}) // held by this call's own lost connection, most likely
		case v == idempotency.VerdictInProgress:
			m.settle(step{kind: kindBusy, err: c.inProgress()})
		default:
			m.settle(c.settle(v, m.attempt.acquired.Record))
		}
	}
	return nil
}

// run runs the function for every member that may run, each in a savepoint.
func (b *batch) run(ctx context.Context, lead *attempt, open []*member) {
	conn := lead.pooled.Conn()
	outer := newHandedTx(conn)
	for _, m := range open {
		if m.state != memberOpen {
			continue
		}
		if ctx.Err() != nil {
			m.settle(failed(context.Cause(ctx)))
			continue
		}
		m.call.entered = startStopwatch()
		done, s := m.attempt.runJoined(ctx, outer)
		switch {
		case done != nil:
			m.done = done
		case m.call.endedFence != 0:
			b.transactionEnded(open)
			if m.settle(s); s.kind != kindDone || s.err != nil {
				m.setAside(step{kind: kindAgain, err: idempotency.ErrTransactionEnded})
			}
			return
		case conn.IsClosed() || conn.PgConn().TxStatus() != 'T':
			b.transactionLost(ctx, conn, open, s.err)
			return
		case s.kind == kindAnswered: // a serialization failure or a deadlock, which the savepoint has undone
			m.setAside(step{kind: kindAgain, err: s.err})
		default:
			m.settle(s)
		}
	}
}

// transactionLost: everything is rolled back. Whose fault it was is not known, so every key is tried by itself.
func (b *batch) transactionLost(ctx context.Context, conn *pgx.Conn, open []*member, err error) {
	for _, m := range open {
		switch {
		case m.state != memberOpen:
		case ctx.Err() != nil:
			m.settle(failed(errors.Join(err, context.Cause(ctx))))
		default:
			m.call.ghost = conn.IsClosed() // the session may live on for a moment, and hold the locks
			m.setAside(step{kind: kindAgain, err: err})
		}
	}
	if conn.IsClosed() && ctx.Err() == nil {
		open[0].call.doubtEpoch()
	}
}

// transactionEnded: a function has ended the transaction, and with it committed, maybe, what ran before. Each of those is
// recorded as failed, so that no retry runs it again. ended is false where no function has.
func (b *batch) transactionEnded(open []*member) (ended bool) {
	for _, m := range open {
		ended = ended || m.call.endedFence != 0
	}
	if !ended {
		return false
	}
	for _, m := range open {
		if m.state != memberOpen {
			continue
		}
		if m.done != nil && m.done.State == idempotency.StateSuccess {
			m.attempt.transactionEnded(nil)
		}
		m.setAside(step{kind: kindAgain, err: idempotency.ErrTransactionEnded})
	}
	return true
}

// ran are the members whose outcome is to be committed.
func ran(open []*member) (done []*member) {
	for _, m := range open {
		if m.done != nil {
			done = append(done, m)
		}
	}
	return done
}

// commit records all outcomes and commits.
func (b *batch) commit(ctx context.Context, lead *attempt, done []*member) {
	completions := make([]*idempotency.Completion, len(done))
	for i, m := range done {
		completions[i] = m.done
		// From here on the record may exist.
		m.call.tokens, m.call.inHand = append(m.call.tokens, m.done.AttemptToken), m.done.AttemptToken
		m.call.noteBypass(m.attempt)
	}
	var records []idempotency.Record
	err := lead.sendCommit(ctx, func(ctx context.Context) (err error) {
		records, err = lead.call.store.CompleteMany(ctx, lead.pooled.Conn(), completions)
		return err
	})
	lead.forgetStatements(ctx, err)
	for i, m := range done {
		m.call.store = lead.call.store
		switch {
		case err == nil:
			m.settle(step{out: outcome{record: records[i], own: true, fresh: true}})
		case errors.Is(err, idempotency.ErrOutcomeUnknown):
			m.call.commitLost(ctx, err) // now, so that one time runs for all
			m.setAside(step{kind: kindUnknown, err: err})
		case errors.Is(err, idempotency.ErrTransactionEnded):
			if m.done.State == idempotency.StateSuccess {
				m.attempt.transactionEnded(nil)
			}
			m.setAside(step{kind: kindAgain, err: err})
		default:
			// A definite rollback. One key's record or constraint may have caused it: by themselves the others get through.
			m.setAside(step{kind: kindAgain, err: err})
		}
	}
}
