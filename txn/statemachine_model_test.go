package txn_test

import (
	"github.com/pgonce/pgonce/idempotency"
)

// model is what design section 4 (state machine) says of one key, without a database.
type model struct {
	req    [2]idempotency.Request // one key, two payloads
	record *modelRecord
	locked bool // by another session

	top       int64 // highest fence so far
	successes int   // generations that ended in SUCCESS: that many orders there must be
	failures  int   // recorded by the runner: that many audit rows
}

type modelRecord struct {
	state     idempotency.State
	payload   int // which request, -1 for none
	past      bool
	gone      bool // the result was dropped
	retryable bool
	code      string
	value     order // stored beside the outcome
	hasValue  bool
}

func (r *modelRecord) expired() bool { return r.past && r.state != idempotency.StateProcessing }

func (r *modelRecord) final() bool {
	return r.state == idempotency.StateSuccess || r.state == idempotency.StateFailed && !r.retryable
}

// verdict is the answer to a call with this payload.
func (m *model) verdict(payload int) idempotency.Verdict {
	r := m.record
	if r != nil && r.expired() {
		r = nil
	}
	switch {
	case r != nil && r.final() && r.payload != payload:
		return idempotency.VerdictMismatch
	case r != nil && r.final() && r.gone && r.state == idempotency.StateSuccess:
		return idempotency.VerdictGone
	case r != nil && r.final():
		return idempotency.VerdictReplay
	case m.locked:
		return idempotency.VerdictInProgress
	case r == nil || r.state == idempotency.StateInit:
		return idempotency.VerdictRun
	case r.payload != payload:
		return idempotency.VerdictMismatch
	}
	return idempotency.VerdictWrongMode
}
