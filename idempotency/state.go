package idempotency

import "time"

// State is what the record stores. TIMEOUT (PROCESSING past its lease) and EXPIRED (any other state past its retention)
// are derived by PostgreSQL's clock and never stored; see Record.TimedOut and Record.Expired.
type State string

// The stored states.
const (
	StateInit       State = "INIT"       // an issued token nobody has used yet
	StateProcessing State = "PROCESSING" // leased mode only: the transactional mode writes its record once, at the end
	StateSuccess    State = "SUCCESS"    // the business transaction committed, and this record with it
	StateFailed     State = "FAILED"     // a recorded failure; final unless Record.Retryable
)

// A Verdict is what the state machine says to a caller who presents a key.
type Verdict string

// The verdicts. Only Run allows the function to run.
const (
	VerdictRun        Verdict = "run"         // absent, expired or an unused token, and the key's lock is ours
	VerdictOwn        Verdict = "own"         // one of this call's own attempts has committed
	VerdictReplay     Verdict = "replay"      // a final record with our fingerprint
	VerdictMismatch   Verdict = "mismatch"    // a visible record with another fingerprint
	VerdictInProgress Verdict = "in progress" // somebody holds the key
	VerdictGone       Verdict = "gone"        // final, but its result was dropped (tombstone)
	VerdictWrongMode  Verdict = "wrong mode"  // the key lives in the leased mode
	VerdictNewer      Verdict = "newer"       // a newer release wrote the record, in a way this one cannot compare
	VerdictResolve    Verdict = "resolve"     // leased mode: the key is ours, and what the dead owner did must be found out first
	VerdictNotIssued  Verdict = "not issued"  // the key must be an issued token, and is none
	VerdictManual     Verdict = "manual"      // leased mode: the owner died, and a person must find out
)

// Acquisition is what PostgreSQL said when a transaction asked for a key.
type Acquisition struct {
	Locked  bool      // this transaction holds the key's advisory lock
	Fence   int64     // of this acquisition, if Locked
	Found   bool      // a record exists, maybe an expired one
	Record  Record    // valid if Found
	Started time.Time // the transaction's start: completion refuses another transaction
	// RequireIssued says that the key must be an issued token; the caller sets it.
	RequireIssued bool
}

// Verdict applies the state machine of the transactional mode. The order of its checks is part of it: an expired record
// counts as absent before its fingerprint can mismatch, and a final record answers whether or not the lock is ours. own
// are the attempt tokens of this call so far.
func (a Acquisition) Verdict(fp Fingerprint, own ...AttemptToken) Verdict {
	if v, ok := a.Record.verdict(a.Found, fp, own); ok {
		return v
	}
	if !a.Locked {
		return VerdictInProgress
	}
	if a.Found && !a.Record.Expired && a.Record.State != StateInit {
		// Locked, and yet a live record that is not final: only the leased mode leaves those behind.
		if v, ok := a.Record.compare(fp); !ok {
			return v
		}
		return VerdictWrongMode
	}
	// Only with the lock: without it somebody may be running the token, which was good when that one began.
	if a.RequireIssued && (!a.Found || a.Record.Expired) {
		return VerdictNotIssued
	}
	return VerdictRun
}

// verdict answers from the record alone, without the lock; ok is false where only the lock's holder may go on.
func (r Record) verdict(found bool, fp Fingerprint, own []AttemptToken) (v Verdict, ok bool) {
	if !found || (r.State != StateSuccess && r.State != StateFailed) {
		return "", false
	}
	for _, token := range own {
		if r.AttemptToken == token {
			return VerdictOwn, true // also when it has expired meanwhile: it is this call's outcome
		}
	}
	if r.Expired || r.Retryable {
		return "", false
	}
	if v, ok := r.compare(fp); !ok {
		return v, true
	}
	// A failure's code and message outlive its body: it is still that failure.
	if r.Result == nil && r.State == StateSuccess {
		return VerdictGone, true
	}
	return VerdictReplay, true
}

// compare reports whether fp may have the record's answer, and if not, why.
func (r Record) compare(fp Fingerprint) (v Verdict, ok bool) {
	switch {
	case fp.Matches(r.Fingerprint):
		return "", true
	case !r.Fingerprint.Known():
		return VerdictNewer, false // no mismatch: "use a new key" would be a second execution
	}
	return VerdictMismatch, false
}

// Verdict answers a plain read, made without the lock: a final record replays, mismatches or is gone; ok is false where
// the key must be acquired to know more.
func (r Record) Verdict(fp Fingerprint) (v Verdict, ok bool) { return r.verdict(true, fp, nil) }
