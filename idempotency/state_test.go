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
		"unused token":               {record(Init), VerdictRun, VerdictInProgress, ""},
		"expired token":              {record(Init, expired), VerdictRun, VerdictInProgress, ""},
		"success":                    {record(Success), VerdictReplay, VerdictReplay, VerdictReplay},
		"failure":                    {record(Failed), VerdictReplay, VerdictReplay, VerdictReplay},
		"failure without a body":     {record(Failed, bodiless), VerdictReplay, VerdictReplay, VerdictReplay},
		"expired success":            {record(Success, expired), VerdictRun, VerdictInProgress, ""},
		"expired failure":            {record(Failed, expired), VerdictRun, VerdictInProgress, ""},
		"other payload":              {record(Success, mismatch), VerdictMismatch, VerdictMismatch, VerdictMismatch},
		"other payload, expired":     {record(Success, mismatch, expired), VerdictRun, VerdictInProgress, ""},
		"other payload, result gone": {record(Success, mismatch, dropped), VerdictMismatch, VerdictMismatch, VerdictMismatch},
		"newer release":              {record(Success, unknown), VerdictNewer, VerdictNewer, VerdictNewer},
		"result gone":                {record(Success, dropped), VerdictGone, VerdictGone, VerdictGone},
		"own":                        {record(Success, own), VerdictOwn, VerdictOwn, VerdictReplay},
		"own, expired meanwhile":     {record(Success, own, expired), VerdictOwn, VerdictOwn, ""},
		"own failure, result gone":   {record(Failed, own, dropped), VerdictOwn, VerdictOwn, VerdictGone},
		"leased and running":         {record(Processing), VerdictWrongMode, VerdictInProgress, ""},
		"leased, past its lease":     {record(Processing, timedOut), VerdictWrongMode, VerdictInProgress, ""},
		"leased, other payload":      {record(Processing, mismatch), VerdictMismatch, VerdictInProgress, ""},
		"retryable failure":          {record(Failed, retryable), VerdictWrongMode, VerdictInProgress, ""},
		"retryable, other payload":   {record(Failed, retryable, mismatch), VerdictMismatch, VerdictInProgress, ""},
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
			if test.record != nil {
				v, _ := test.record.Verdict(fp)
				require.Equal(t, test.withoutLock, v)
			}
		})
	}
}
