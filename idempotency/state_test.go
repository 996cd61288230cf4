package idempotency

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestVerdict is docs/state_machine.md as a table.
func TestVerdict(t *testing.T) {
	t.Parallel()
	fp, other := FingerprintBytes([]byte("one")), FingerprintBytes([]byte("two"))
	newer, err := ParseFingerprint(append([]byte{200}, make([]byte, 32)...))
	require.NoError(t, err)
	ours := AttemptToken{1}
	record := func(state State, change ...func(*Record)) *Record {
		r := &Record{State: state, Fingerprint: fp, ResultType: "json/1", Result: []byte("{}"), AttemptToken: AttemptToken{9}}
		for _, f := range change {
			f(r)
		}
		return r
	}
	expired := func(r *Record) { r.Expired = true }
	timedOut := func(r *Record) { r.TimedOut = true }
	retryable := func(r *Record) { r.Retryable = true }
	dropped := func(r *Record) { r.Result = nil }
	bodiless := func(r *Record) { r.Result, r.ResultType = nil, "" }
	own := func(r *Record) { r.AttemptToken = ours }
	mismatch := func(r *Record) { r.Fingerprint = other }
	unknown := func(r *Record) { r.Fingerprint = newer }

	for name, test := range map[string]struct {
		record            *Record
		locked, notLocked Verdict
		withoutLock       Verdict // of a plain read; "" = must acquire
	}{
		"absent":                     {nil, VerdictRun, VerdictInProgress, ""},
		"unused token":               {record(StateInit), VerdictRun, VerdictInProgress, ""},
		"expired token":              {record(StateInit, expired), VerdictRun, VerdictInProgress, ""},
		"success":                    {record(StateSuccess), VerdictReplay, VerdictReplay, VerdictReplay},
		"failure":                    {record(StateFailed), VerdictReplay, VerdictReplay, VerdictReplay},
		"failure without a body":     {record(StateFailed, bodiless), VerdictReplay, VerdictReplay, VerdictReplay},
		"expired success":            {record(StateSuccess, expired), VerdictRun, VerdictInProgress, ""},
		"expired failure":            {record(StateFailed, expired), VerdictRun, VerdictInProgress, ""},
		"other payload":              {record(StateSuccess, mismatch), VerdictMismatch, VerdictMismatch, VerdictMismatch},
		"other payload, expired":     {record(StateSuccess, mismatch, expired), VerdictRun, VerdictInProgress, ""},
		"other payload, result gone": {record(StateSuccess, mismatch, dropped), VerdictMismatch, VerdictMismatch, VerdictMismatch},
		"newer release":              {record(StateSuccess, unknown), VerdictNewer, VerdictNewer, VerdictNewer},
		"result gone":                {record(StateSuccess, dropped), VerdictGone, VerdictGone, VerdictGone},
		"own":                        {record(StateSuccess, own), VerdictOwn, VerdictOwn, VerdictReplay},
		"own, expired meanwhile":     {record(StateSuccess, own, expired), VerdictOwn, VerdictOwn, ""},
		"own failure, result gone":   {record(StateFailed, own, dropped), VerdictOwn, VerdictOwn, VerdictReplay},
		"failure, its body dropped":  {record(StateFailed, dropped), VerdictReplay, VerdictReplay, VerdictReplay},
		"leased and running":         {record(StateProcessing), VerdictWrongMode, VerdictInProgress, ""},
		"leased, past its lease":     {record(StateProcessing, timedOut), VerdictWrongMode, VerdictInProgress, ""},
		"leased, other payload":      {record(StateProcessing, mismatch), VerdictMismatch, VerdictInProgress, ""},
		"retryable failure":          {record(StateFailed, retryable), VerdictWrongMode, VerdictInProgress, ""},
		"retryable, other payload":   {record(StateFailed, retryable, mismatch), VerdictMismatch, VerdictInProgress, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := Acquisition{}
			if test.record != nil {
				a.Found, a.Record = true, *test.record
			}
			require.Equal(t, test.notLocked, a.Verdict(fp, ours))
			a.Locked = true
			require.Equal(t, test.locked, a.Verdict(fp, ours))
			// Where a token is required, only an unused one runs; everything else is answered as ever.
			a.RequireIssued = true
			if test.locked == VerdictRun && name != "unused token" {
				require.Equal(t, VerdictNotIssued, a.Verdict(fp, ours))
			} else {
				require.Equal(t, test.locked, a.Verdict(fp, ours))
			}
			a.Locked = false
			require.Equal(t, test.notLocked, a.Verdict(fp, ours), "somebody may be running it")
			if test.record != nil {
				v, _ := test.record.Verdict(fp)
				require.Equal(t, test.withoutLock, v)
			}
		})
	}
}
