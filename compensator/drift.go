package compensator

import (
	"bytes"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// DriftKind says how a front differs from PostgreSQL.
type DriftKind string

// The kinds. PostgreSQL is right in all of them.
const (
	DriftMissing    DriftKind = "MISSING"     // an outcome was committed, and the front does not have it
	DriftNoRecord   DriftKind = "NO_RECORD"   // the front has an outcome that was rolled back, lost, or has ended
	DriftOtherEpoch DriftKind = "OTHER_EPOCH" // it is of before a failover or a restore
	DriftWrong      DriftKind = "WRONG"       // another fence, fingerprint, attempt or answer
	DriftEndless    DriftKind = "ENDLESS"     // it would outlive its record, or stay for ever
	DriftNoOwner    DriftKind = "NO_OWNER"    // "running", and nobody runs it
	DriftUnreadable DriftKind = "UNREADABLE"  // nobody can read it
)

// Drift is one difference.
type Drift struct {
	Front  string
	Kind   DriftKind
	Key    idempotency.Key // zero where it cannot be told: of marks, and of what does not read
	Name   string          // the front's name for it; empty: it has none
	Detail string
	Healed bool // false: in a dry run, or left to end by itself
}

// judge compares an entry with its record. No kind: they agree.
func judge(k *idempotency.Kept, r *idempotency.Record, found bool, snap idempotency.Snapshot) (kind DriftKind, detail string) {
	switch {
	case k.Foreign:
		return DriftUnreadable, "it has not the form of an entry or a mark"
	case k.Unreadable:
		return DriftUnreadable, "no record can be read from it"
	case k.Epoch != snap.Epoch:
		return DriftOtherEpoch, fmt.Sprintf("epoch %s, and PostgreSQL is in %s", k.Epoch, snap.Epoch)
	case !found:
		return DriftNoRecord, "PostgreSQL has no record of the key"
	case !r.Keepable():
		return DriftNoRecord, "PostgreSQL has " + string(r.State)
	case r.Expired:
		return DriftNoRecord, "the record has expired"
	}
	if what := difference(&k.Record, r, k.Elsewhere); what != "" {
		return DriftWrong, what
	}
	if left := r.Life(snap.Now); k.Life < 0 || k.Life > left+lifeSlack {
		return DriftEndless, fmt.Sprintf("the record's answer is to live for %v", left.Round(time.Second))
	}
	return "", ""
}

// difference names the first thing in which an entry is not its record.
func difference(kept, r *idempotency.Record, elsewhere bool) string {
	switch {
	case kept.Generation != r.Generation:
		return fmt.Sprintf("generation %d, and the record's is %d", kept.Generation, r.Generation)
	case kept.Fence != r.Fence:
		return fmt.Sprintf("fence %d, and the record's is %d", kept.Fence, r.Fence)
	case kept.AttemptToken != r.AttemptToken:
		return "the attempt token"
	case !bytes.Equal(kept.Fingerprint.Bytes(), r.Fingerprint.Bytes()):
		return "the fingerprint"
	case kept.State != r.State:
		return fmt.Sprintf("%s, and the record is %s", kept.State, r.State)
	case kept.ErrorCode != r.ErrorCode, kept.ErrorMessage != r.ErrorMessage:
		return "the error"
	case kept.ResultType != r.ResultType, !elsewhere && !bytes.Equal(kept.Result, r.Result):
		return "the result"
	}
	return ""
}

// publishable: the front may have it, and would keep it for a moment at least.
func publishable(r *idempotency.Record, now time.Time) bool {
	return r.Keepable() && !r.Expired && r.Life(now) > lifeSlack
}

// drift is where a kind is counted.
func (r *Report) drift(kind DriftKind) *int {
	switch kind {
	case DriftMissing:
		return &r.Missing
	case DriftNoRecord:
		return &r.NoRecord
	case DriftOtherEpoch:
		return &r.OtherEpoch
	case DriftWrong:
		return &r.Wrong
	case DriftEndless:
		return &r.Endless
	case DriftNoOwner:
		return &r.NoOwner
	}
	return &r.Unreadable
}

// Drifted is how many differences were found between fronts and PostgreSQL.
func (r Report) Drifted() int {
	return r.Missing + r.NoRecord + r.OtherEpoch + r.Wrong + r.Endless + r.NoOwner + r.Unreadable
}
