package db_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// leaseModel is what the state machine says of one key in the leased mode, without a database.
type leaseModel struct {
	state     string // empty: no record
	payload   int
	rule      string
	retryable bool
	stale     bool // PROCESSING past its lease
	expired   bool // final, past its retention
	attempt   int
	owner     int // whose attempt token the record has
	fence     int64
	life      int // how often the key has begun
}

// attempt is one that was allowed to run.
type attempt struct {
	token []byte
	fence int64
	life  int
	ended bool // by itself, with a failure
}

type leaseMachine struct {
	conn     *pgx.Conn
	key      string
	model    leaseModel
	attempts []attempt
	top      int64
}

var rules = []string{"RERUN", "RESUME", "RESOLVE", "MANUAL"}

// open reports whether an attempt of this life of the key has no recorded end.
func (m *leaseMachine) open() bool {
	for _, a := range m.attempts {
		if a.life == m.model.life && !a.ended {
			return true
		}
	}
	return false
}

func (m *leaseMachine) verdict(payload int, resolver bool) string {
	r := &m.model
	switch {
	case r.state == "" || r.expired:
		return "RUN"
	case r.payload != payload:
		return "MISMATCH"
	case r.state == "SUCCESS", r.state == "FAILED" && !r.retryable:
		return "REPLAY"
	case r.state == "PROCESSING" && !r.stale:
		return "IN_PROGRESS"
	case r.rule == "RERUN", r.rule == "RESUME", r.state == "FAILED" && !m.open():
		return "RUN"
	case r.rule == "RESOLVE" && resolver:
		return "RESOLVE"
	}
	return "MANUAL"
}

func (m *leaseMachine) acquire(t *rapid.T) {
	payload, resolver := rapid.IntRange(0, 1).Draw(t, "payload"), rapid.Bool().Draw(t, "resolver")
	rule := rapid.SampledFrom(rules).Draw(t, "rule")
	want := m.verdict(payload, resolver)
	token := make([]byte, 16)
	_, _ = rand.Read(token)
	var verdict string
	var fence *int64
	var attemptNumber *int32
	var result []byte
	err := m.conn.QueryRow(t.Context(), `SELECT verdict, fence, attempt, result FROM idempotency.acquire('acme', 'op', $1,
			idempotency.fingerprint_of($2), $3, takeover => $4, resolver => $5)`,
		m.key, []byte{byte(payload)}, token, rule, resolver).Scan(&verdict, &fence, &attemptNumber, &result)
	require.NoError(t, err)
	require.Equal(t, want, verdict)
	r := &m.model
	if want == "REPLAY" && r.state == "SUCCESS" {
		require.Equal(t, fmt.Sprint("result ", r.owner), string(result))
	}
	if want != "RUN" && want != "RESOLVE" {
		return
	}
	require.Greater(t, *fence, m.top, "fences only rise")
	m.top = *fence
	if r.state == "" || r.expired {
		*r = leaseModel{payload: payload, rule: rule, life: r.life + 1}
	}
	r.state, r.retryable, r.stale, r.fence = "PROCESSING", false, false, *fence
	r.attempt++
	require.EqualValues(t, r.attempt, *attemptNumber)
	m.attempts = append(m.attempts, attempt{token: token, fence: *fence, life: r.life})
	r.owner = len(m.attempts) - 1
}

// owner picks one that was allowed to run, maybe long ago.
func (m *leaseMachine) owner(t *rapid.T) (i int, owns bool) {
	if len(m.attempts) == 0 {
		t.Skip("nobody has run")
	}
	i = rapid.IntRange(max(0, len(m.attempts)-3), len(m.attempts)-1).Draw(t, "owner")
	r := &m.model
	return i, r.state == "PROCESSING" && r.owner == i && r.fence == m.attempts[i].fence
}

func (m *leaseMachine) ask(t *rapid.T, i int, sql string, args ...any) (code string) {
	a := m.attempts[i]
	_, err := m.conn.Exec(t.Context(), sql, append([]any{m.key, a.fence, a.token}, args...)...)
	if err == nil {
		return ""
	}
	var server *pgconn.PgError
	require.True(t, errors.As(err, &server), "%v", err)
	return server.Code
}

func code(ok bool) string {
	if ok {
		return ""
	}
	return "ZP003"
}

func (m *leaseMachine) renew(t *rapid.T) {
	i, owns := m.owner(t)
	require.Equal(t, code(owns), m.ask(t, i, `SELECT idempotency.renew('acme', 'op', $1, $2, $3)`))
	if owns {
		m.model.stale = false // also behind the lease's end, while nobody has taken over
	}
}

func (m *leaseMachine) step(t *rapid.T) {
	i, owns := m.owner(t)
	name := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name")
	require.Equal(t, code(owns), m.ask(t, i, `SELECT idempotency.record_step('acme', 'op', $1, $2, $3, $4, '1')`, name))
}

func (m *leaseMachine) complete(t *rapid.T) {
	i, owns := m.owner(t)
	r := &m.model
	want := code(owns)
	if r.state == "SUCCESS" && r.owner == i && r.fence == m.attempts[i].fence {
		want = "ZP002" // sent again: its business rows must not come twice
	}
	require.Equal(t, want, m.ask(t, i, `SELECT idempotency.complete('acme', 'op', $1, $2, $3, $4)`, fmt.Append(nil, "result ", i)))
	if owns {
		r.state, r.stale = "SUCCESS", false
	}
}

func (m *leaseMachine) fail(t *rapid.T) {
	i, owns := m.owner(t)
	r := &m.model
	retryable := rapid.Bool().Draw(t, "retryable")
	again := r.state == "FAILED" && r.owner == i && r.fence == m.attempts[i].fence // sent again
	require.Equal(t, code(owns || again), m.ask(t, i, `SELECT idempotency.fail('acme', 'op', $1, $2, $3, 'code', 'text', $4)`, retryable))
	if owns {
		r.state, r.stale, r.retryable = "FAILED", false, retryable
		m.attempts[i].ended = true
	}
}

func (m *leaseMachine) rescue(t *rapid.T) {
	r := &m.model
	want := r.state == "PROCESSING" && r.stale && (r.rule == "RERUN" || r.rule == "RESUME")
	var rescued bool
	require.NoError(t, m.conn.QueryRow(t.Context(), `SELECT idempotency.rescue('acme', 'op', $1, $2, 'model', 'stale')`, m.key, r.fence).Scan(&rescued))
	require.Equal(t, want, rescued)
	if !want {
		return
	}
	require.NoError(t, m.conn.QueryRow(t.Context(), `SELECT fence FROM idempotency.records WHERE key = $1`, m.key).Scan(&r.fence))
	require.Greater(t, r.fence, m.top)
	m.top = r.fence
	r.state, r.retryable, r.stale = "FAILED", true, false
}

// timePasses is a lease's end, or a record's.
func (m *leaseMachine) timePasses(t *rapid.T) {
	_, err := m.conn.Exec(t.Context(), `UPDATE idempotency.records SET
		lease_expires_at = CASE WHEN state = 'PROCESSING' THEN statement_timestamp() - interval '1 s' END,
		expires_at = CASE WHEN state <> 'PROCESSING' THEN statement_timestamp() - interval '1 s' END WHERE key = $1`, m.key)
	require.NoError(t, err)
	m.model.stale = m.model.state == "PROCESSING"
	m.model.expired = m.model.state != "" && m.model.state != "PROCESSING"
}

// check compares the stored record with the model.
func (m *leaseMachine) check(t *rapid.T) {
	var state string
	var fence int64
	var number int
	var expires bool
	var token []byte
	err := m.conn.QueryRow(t.Context(), `SELECT state, fence, attempt, expires_at IS NOT NULL, attempt_token FROM idempotency.records WHERE key = $1`, m.key).
		Scan(&state, &fence, &number, &expires, &token)
	if m.model.state == "" {
		require.ErrorIs(t, err, pgx.ErrNoRows)
		return
	}
	require.NoError(t, err)
	require.Equal(t, m.model.state, state)
	require.Equal(t, m.model.fence, fence)
	require.Equal(t, m.model.attempt, number)
	require.Equal(t, state != "PROCESSING", expires, "PROCESSING never expires")
	require.Equal(t, m.attempts[m.model.owner].token, token)
	var rows, begun int
	require.NoError(t, m.conn.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE event IN ('ACQUIRED', 'TAKEOVER')), count(DISTINCT generation)
		FROM idempotency.attempts WHERE key = $1`, m.key).Scan(&rows, &begun))
	require.Equal(t, len(m.attempts), rows, "every attempt is in the audit")
	require.Equal(t, m.model.life, begun)
}

// Whatever acquires, renews, completes, fails, rescues and dies in whatever order: the database says what the model says.
func TestLeases_AreTheStateMachine(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	keys := 0
	rapid.Check(t, func(t *rapid.T) {
		keys++
		m := &leaseMachine{conn: conn, key: fmt.Sprint("k", keys)}
		t.Repeat(map[string]func(*rapid.T){
			"acquire": m.acquire, "acquire more": m.acquire, "renew": m.renew, "step": m.step, "complete": m.complete, "fail": m.fail,
			"rescue": m.rescue, "time passes": m.timePasses, "": m.check,
		})
	})
}
