package idempotency

import (
	"context"
	"time"
)

// OnEvent receives what happens, in the goroutine where it happens: it must be quick. Keys are part of events for traces
// and logs (Key.LogValue hides the value); they must never become labels of metrics.
type OnEvent func(ctx context.Context, e Event)

// Event is one of the types below, and no other.
type Event interface{ event() }

// Executed says that the function ran and its outcome was committed. Runs counts how often the function was entered.
type Executed struct {
	Key      Key
	Strategy Strategy
	State    State // Success or Failed
	Runs     int
	Duration time.Duration
}

// Replayed says that an outcome recorded before was given again. Shared: by a concurrent call of this process, without a question
// to PostgreSQL. From is the name of the front that gave it; empty: none did.
type Replayed struct {
	Key      Key
	Strategy Strategy
	State    State
	Shared   bool
	From     string
	Duration time.Duration
}

// Refused says that the caller got no outcome, and why: ErrInProgress, ErrMismatch, ErrResultExpired, ErrNewerRecord,
// ErrWrongMode, ErrNotIssued, ErrRestartOuter.
type Refused struct {
	Key      Key
	Strategy Strategy
	Err      error
	Duration time.Duration
}

// Unresolved says that the call ended with ErrOutcomeUnknown.
type Unresolved struct {
	Key      Key
	Strategy Strategy
	Err      error
	Duration time.Duration
}

// RolledBack says that the function or the database failed: everything was rolled back and nothing recorded. Under
// StrategyCache nothing can be rolled back: there it says only that nothing was kept.
type RolledBack struct {
	Key      Key
	Strategy Strategy
	Err      error
	Duration time.Duration
}

// Restarted says that the transaction is run again from its start, after a serialization failure, a deadlock or a lost connection.
type Restarted struct {
	Key  Key
	Runs int // how often the function was entered so far; 0 if there was not even a connection
	Err  error
}

// CommitUnknown says that COMMIT was sent and its answer never came. CommitResolved or Unresolved follows.
type CommitUnknown struct {
	Key Key
	Err error
}

// CommitResolved says that it was found out what a lost COMMIT did: Committed, or it never will.
type CommitResolved struct {
	Key       Key
	Committed bool
	Duration  time.Duration
}

// LeaseLost says that a leased function may not be its key's owner any more, and that its context has ended.
type LeaseLost struct {
	Key   Key
	Fence int64
	Err   error
}

// FrontFailed says that a front could not do what it was asked. The call went on without it.
type FrontFailed struct {
	Front string
	Op    string // "begin", "publish", ...
	Err   error
}

// FrontDegraded says that a front is not asked any more, after Err, or is again.
type FrontDegraded struct {
	Front    string
	Degraded bool
	Err      error
}

// FrontMismatch says that a front's entry was not what PostgreSQL has, and was evicted.
type FrontMismatch struct {
	Front string
	Key   Key
}

// Bypassed says that the function ran and was committed without a record, because of a policy: under EnforcementOff nothing is
// recorded, under EnforcementShadow a later call of a key is executed. WouldBe is what EnforcementEnforce would have done.
type Bypassed struct {
	Key         Key
	Strategy    Strategy
	Enforcement Enforcement
	WouldBe     WouldBe
	State       State // Success or Failed
	Runs        int
	Duration    time.Duration
}

// PolicyIgnored says that a leased call was enforced although its policy is weaker: what was asked of others cannot be rolled back.
type PolicyIgnored struct {
	Key         Key
	Enforcement Enforcement
}

// PolicyChanged says that this process obeys a policy from now on, or not any more: Removed. A kill switch is one whose
// Enforcement is EnforcementOff.
type PolicyChanged struct {
	Policy  Policy
	Removed bool
}

// OutsideTransaction says that a function has asked something of another connection than its transaction's: a txn.Tracer saw it.
// Call is "acquire" (a connection of a pool), "query" (also Exec), "batch", "copy" or "prepare". SQL is the statement's text as
// the program gave it, never its arguments; empty for "acquire". Caller is the place in the program, as file:line.
type OutsideTransaction struct {
	Key     Key
	Call    string
	SQL     string
	Caller  string
	Refused bool
}

func (Executed) event()       {}
func (Replayed) event()       {}
func (Refused) event()        {}
func (RolledBack) event()     {}
func (Unresolved) event()     {}
func (Restarted) event()      {}
func (CommitUnknown) event()  {}
func (CommitResolved) event() {}
func (LeaseLost) event()      {}
func (FrontFailed) event()    {}
func (FrontDegraded) event()  {}
func (FrontMismatch) event()  {}
func (Bypassed) event()       {}
func (PolicyIgnored) event()  {}
func (PolicyChanged) event()  {}

func (OutsideTransaction) event() {}
