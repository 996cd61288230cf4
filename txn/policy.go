package txn

import (
	"context"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// obey takes over what is in force when the call begins. It counts for the whole call, over all its attempts.
func (c *call) obey() {
	r, op := c.runner, c.op
	c.strategy, c.wait, c.noLocal = op.Strategy, op.Wait, op.NoLocal
	c.policy.Enforcement = idempotency.EnforcementEnforce
	if r.config.Policies != nil {
		c.policy = r.config.Policies.For(c.req.Key)
		c.override()
	}
	c.fronted = c.strategy == idempotency.StrategyHybrid && r.fronts.configured() && c.enforced()
}

// override never weakens: STRICT and HYBRID give the same answers.
func (c *call) override() {
	declared := c.op.Strategy == idempotency.StrategyStrict || c.op.Strategy == idempotency.StrategyHybrid
	if to := c.policy.Strategy; declared && (to == idempotency.StrategyStrict || to == idempotency.StrategyHybrid && c.runner.fronts.configured()) {
		c.strategy = to
	}
	if c.policy.Local != nil {
		c.noLocal = !*c.policy.Local
	}
	if c.policy.Wait != nil {
		c.wait = *c.policy.Wait
		if c.op.Retention != idempotency.Forever { // Operation's own rule
			c.wait = min(c.wait, c.op.Retention/2)
		}
	}
}

func (c *call) enforced() bool { return c.policy.Enforcement == idempotency.EnforcementEnforce }

// enforceLease: what a leased call asks of others cannot be rolled back, so a policy never has it asked twice. Strategy, local
// front and Wait are the policy's all the same.
func (c *call) enforceLease(ctx context.Context) {
	if c.enforced() {
		return
	}
	c.emit(ctx, idempotency.PolicyIgnored{Key: c.req.Key, Enforcement: c.policy.Enforcement})
	c.policy.Enforcement = idempotency.EnforcementEnforce
	c.fronted = c.strategy == idempotency.StrategyHybrid && c.runner.fronts.configured()
}

// bypassed: an attempt of this call has committed without a record. Every record has a fence.
func (o *outcome) bypassed() bool { return o.own && o.record.Fence == 0 }

// byPolicy turns what the key says into what the policy makes of it. Where the function is to run and not to be recorded, the
// attempt has a bypass afterwards. db is the transaction that has acquired the key.
func (a *attempt) byPolicy(ctx context.Context, db idempotency.DB, v idempotency.Verdict) (idempotency.Verdict, error) {
	c := a.call
	a.bypass = nil
	switch c.policy.Enforcement {
	case idempotency.EnforcementEnforce:
		if v == idempotency.VerdictRun && c.endedFence == 0 && c.guarded() {
			return a.unlessBypassed(ctx, db)
		}
		return v, nil
	case idempotency.EnforcementOff:
		// What runs is not run beside, also now: whoever waits for it is answered in a moment. And what is recorded answers.
		if v == idempotency.VerdictRun || v == idempotency.VerdictInProgress && c.endedFence != 0 {
			return a.without(idempotency.WouldRun), nil
		}
	case idempotency.EnforcementShadow:
		if would, runs := shadowed[v]; runs {
			return a.without(would), nil
		}
		if v == idempotency.VerdictRun {
			return a.afterLostCommit(v), nil
		}
	}
	return v, nil
}

// shadowed are the answers that shadow only notes. Not those that name an error of the program or a token that nobody issued:
// they are no duplicates.
var shadowed = map[idempotency.Verdict]idempotency.WouldBe{
	idempotency.VerdictReplay:     idempotency.WouldReplay,
	idempotency.VerdictMismatch:   idempotency.WouldMismatch,
	idempotency.VerdictGone:       idempotency.WouldBeGone,
	idempotency.VerdictNewer:      idempotency.WouldBeNewer,
	idempotency.VerdictInProgress: idempotency.WouldBeBusy,
}

// without has the function run without a record.
func (a *attempt) without(would idempotency.WouldBe) idempotency.Verdict {
	c := a.call
	if would == idempotency.WouldBeBusy && c.ghost && c.endedFence == 0 {
		return idempotency.VerdictInProgress // held by this call's own lost connection, most likely
	}
	v := a.afterLostCommit(idempotency.VerdictRun)
	if v == idempotency.VerdictRun {
		a.bypass = &idempotency.Bypass{
			Enforcement: c.policy.Enforcement, WouldBe: would, Change: c.policy.Change, Ended: c.endedFence != 0,
		}
	}
	return v
}

// afterLostCommit has an attempt behind a lost COMMIT look for it once more. No unique key would refuse a second row of
// idempotency.bypasses: only whoever has the key's lock knows that the transaction which had it before is over, and only a
// transaction that begins after that is sure to see what it wrote.
func (a *attempt) afterLostCommit(v idempotency.Verdict) idempotency.Verdict {
	c := a.call
	if !c.without || !c.unknown.running() || c.proven == len(c.tokens) {
		return v
	}
	if !a.acquired.Locked {
		return idempotency.VerdictInProgress
	}
	c.proven = len(c.tokens)
	return idempotency.VerdictOwn // resolve looks
}

// guarded reports whether the key may have been executed without a record. What the process has learnt since the call began
// counts too: a duplicate may have waited for a call that another process has executed under a newer policy.
func (c *call) guarded() bool {
	if c.policy.Guarded || c.runner.config.Policies == nil {
		return c.policy.Guarded
	}
	now := c.runner.config.Policies.For(c.req.Key)
	return now.Guarded || now.Enforcement != idempotency.EnforcementEnforce
}

// unlessBypassed refuses a key that was executed without a record, while the kill switch was on or beside a running call: it
// is done, and its result was not kept.
func (a *attempt) unlessBypassed(ctx context.Context, db idempotency.DB) (idempotency.Verdict, error) {
	c := a.call
	v, r, err := c.runner.store.OpenBypass(ctx, db, c.req)
	if err == nil && v != idempotency.VerdictRun {
		a.acquired.Record = r
	}
	return v, err
}

// repeats reports whether another request of the same batch with the same key is a call of its own.
func (c *call) repeats() bool { return !c.enforced() }

// noteBypass remembers before COMMIT is sent what finding out about it will need.
func (c *call) noteBypass(a *attempt) {
	if a.bypass != nil {
		c.without, c.wouldBe = true, a.bypass.WouldBe
		c.unlocked = c.unlocked || !a.acquired.Locked
	}
}

// reportBypassed is the event of a call that was executed without a record.
func (c *call) reportBypassed(ctx context.Context, out *outcome, took time.Duration) {
	c.emit(ctx, idempotency.Bypassed{
		Key: c.req.Key, Strategy: c.strategy, Enforcement: c.policy.Enforcement, WouldBe: c.wouldBe, State: out.record.State,
		Runs: c.runs, Duration: took,
	})
}
