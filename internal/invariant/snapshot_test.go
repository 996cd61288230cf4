package invariant

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// I4, by what is done to a record between two snapshots.
func TestSnapshot_I4OnlyWhatTheStateMachineAllows(t *testing.T) {
	t.Parallel()
	const (
		expire  = "UPDATE idempotency.records SET expires_at = now() - interval '1 s' WHERE key = 'k'"
		finish  = "UPDATE idempotency.records SET state = 'SUCCESS', completed_at = now(), lease_expires_at = NULL, result_type = 'raw', result = 'x' WHERE key = 'k'"
		reborn  = "UPDATE idempotency.records SET fence = fence + 5, generation = fence + 5, attempt_token = decode(repeat('77', 16), 'hex') WHERE key = 'k'"
		later   = "UPDATE idempotency.records SET fence = fence + 5, attempt = attempt + 1, attempt_token = decode(repeat('77', 16), 'hex') WHERE key = 'k'"
		vanish  = "DELETE FROM idempotency.records WHERE key = 'k'"
		nothing = "SELECT 1"
	)
	set := func(what string) string { return "UPDATE idempotency.records SET " + what + " WHERE key = 'k'" }
	s := newShop(t)
	for _, tc := range []struct {
		name, state   string
		before, after string // SQL before the first snapshot, and before the second
		want          string // empty: allowed
	}{
		{"nothing happens", "SUCCESS", nothing, nothing, ""},
		{"completed", "PROCESSING", nothing, finish, ""},
		{"renewed", "PROCESSING", nothing, set("lease_expires_at = now() + interval '1 h'"), ""},
		{"taken over", "PROCESSING", nothing, later, ""},
		{"taken over and completed", "PROCESSING", nothing, later + ";" + finish, ""},
		{"tried again", "FAILED again", nothing, later + ";" + set("state = 'PROCESSING', retryable = false, completed_at = NULL, lease_expires_at = now(), error_code = NULL, error_message = NULL, result = NULL, result_type = NULL"), ""},
		{"used again after its retention", "SUCCESS", expire, reborn, ""},
		{"purged after its retention", "FAILED", expire, vanish, ""},
		{"token used", "INIT", nothing, set("fence = fence + 5, generation = fence + 5, state = 'PROCESSING', attempt = 1, acquired_at = now(), executor = 'x', takeover = 'RERUN', lease_expires_at = now(), fingerprint = decode(repeat('01', 33), 'hex'), attempt_token = decode(repeat('77', 16), 'hex')"), ""},
		{"result dropped in time", "SUCCESS", set("result_expires_at = now() - interval '1 s'"), set("result = NULL"), ""},
		{"kept for longer", "SUCCESS", nothing, set("expires_at = expires_at + interval '1 d'"), ""},
		{"kept for ever", "SUCCESS", nothing, set("expires_at = NULL"), ""},

		{"vanished", "SUCCESS", nothing, vanish, "is gone and had not expired"},
		{"running and vanished", "PROCESSING", set("expires_at = now() - interval '1 d'"), vanish, "is gone and had not expired"},
		{"fence went back", "SUCCESS", nothing, set("fence = fence - 1, generation = generation - 1"), "the fence went back"},
		{"generation went back", "SUCCESS", nothing, set("generation = generation - 1"), "the generation went back"},
		{"used again too early", "SUCCESS", nothing, reborn, "the old one had not expired"},
		{"used again while it ran", "PROCESSING", expire, reborn, "the old one had not expired"},
		{"used again with an old fence", "SUCCESS", later + ";" + expire, set("generation = fence"), "a new generation without a new fence"},
		{"used again by the old attempt", "SUCCESS", expire, set("fence = fence + 5, generation = fence + 5"), "by the old attempt"},
		{"final and acquired again", "SUCCESS", nothing, later, "a final record was acquired again"},
		{"failed and acquired again", "FAILED", nothing, later, "a final record was acquired again"},
		{"token without a generation", "INIT", nothing, set("fence = fence + 5"), "an unused token was acquired without a new generation"},
		{"attempt went back", "PROCESSING", later, set("fence = fence + 1, attempt = 1"), "the attempt went back"},
		{"taken over for another request", "PROCESSING", nothing, later + ";" + set("fingerprint = decode(repeat('02', 33), 'hex')"), "another request's fingerprint"},
		{"taken over and shortened", "PROCESSING", nothing, later + ";" + set("expires_at = now()"), "expires_at went back"},
		{"another owner with the same fence", "PROCESSING", nothing, set("attempt_token = decode(repeat('77', 16), 'hex')"), "another attempt with the same fence"},
		{"other fingerprint", "SUCCESS", nothing, set("fingerprint = decode(repeat('02', 33), 'hex')"), "another request's fingerprint"},
		{"shortened", "SUCCESS", set("expires_at = NULL"), set("expires_at = now()"), "expires_at went back"},
		{"success became a failure", "SUCCESS", nothing, set("state = 'FAILED', error_code = 'x', error_message = ''"), "no such step"},
		{"failure became a success", "FAILED", nothing, set("state = 'SUCCESS', error_code = NULL, error_message = NULL"), "no such step"},
		{"final failure became retryable", "FAILED", nothing, set("retryable = true, takeover = 'RERUN'"), "no such step"},
		{"result changed", "SUCCESS", nothing, set("result = 'other'"), "the result changed"},
		{"result dropped too early", "SUCCESS", nothing, set("result = NULL"), "the result changed"},
	} {
		s.exec(t, "TRUNCATE idempotency.records")
		s.record(t, "other", "SUCCESS")
		s.record(t, "k", tc.state)
		s.exec(t, tc.before)
		before, err := Take(t.Context(), s.Pool, place)
		require.NoError(t, err)
		s.exec(t, tc.after)
		after, err := Take(t.Context(), s.Pool, place)
		require.NoError(t, err)
		violations := before.Compare(after)
		if tc.want == "" {
			require.Empty(t, violations, tc.name)
			continue
		}
		require.Len(t, violations, 1, tc.name)
		require.Equal(t, I4, violations[0].Invariant, tc.name)
		require.Equal(t, "k", violations[0].Key, tc.name)
		require.Contains(t, violations[0].What, tc.want, tc.name)
	}
}
