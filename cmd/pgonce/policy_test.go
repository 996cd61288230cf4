package main

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// service is a process that obeys policies.
type service struct {
	pool     *pgxpool.Pool
	url      string
	policies *idempotency.Policies
	runner   *txn.Runner
}

func newService(t *testing.T) *service {
	t.Helper()
	s := &service{pool: pgtest.Pool(t, txn.ConfigurePool)}
	s.url = urlOf(s.pool)
	var err error
	s.policies, err = idempotency.NewPolicies(s.pool, nil)
	require.NoError(t, err)
	s.runner, err = txn.New(s.pool, &txn.Config{
		Operations: []idempotency.Operation{{Name: "order.create"}, {Name: "order.cancel"}}, Policies: s.policies,
		TraceID: func(context.Context) string { return "trace-1" },
	})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	return s
}

// call runs a key once more, behind a fresh read of the policies.
func (s *service) call(t *testing.T, operation, value, body string) (txn.Result[int], error) {
	t.Helper()
	_, err := s.policies.RunOnce(t.Context())
	require.NoError(t, err)
	key, err := idempotency.NewKey("acme", operation, value)
	require.NoError(t, err)
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(body))}
	return txn.WithIdempotency(t.Context(), s.runner, req, func(context.Context, pgx.Tx) (int, error) { return 1, nil })
}

func (s *service) do(t *testing.T, want int, args ...string) answer {
	t.Helper()
	a := pgonce(t, s.url, "", append([]string{"policy"}, args...)...)
	require.Equal(t, want, a.code, "%v: %s%s", args, a.out, a.err)
	return a
}

// A release from shadow over 5 % to everything, and what is seen on the way.
func TestRehearsal_GradualRelease(t *testing.T) {
	t.Parallel()
	s := newService(t)
	why := []string{"--reason", "release 4.2", "--actor", "ada", "--yes"}
	require.Contains(t, s.do(t, exitOK, "list").err, "everything is enforced as it is declared")
	a := s.do(t, exitOK, append([]string{"set", "--operation", "order.create", "--enforcement", "shadow", "--wait", "500ms", "--local", "off"}, why...)...)
	require.Equal(t, "order.create: shadow\n", a.out)
	require.Contains(t, a.err, "a duplicate IS EXECUTED")

	for _, body := range []string{"{}", "{}", "{}", "other"} {
		_, err := s.call(t, "order.create", "k-1", body)
		require.NoError(t, err)
	}
	_, err := s.call(t, "order.cancel", "k-1", "{}")
	require.NoError(t, err)
	v := object(t, s.url, exitOK, "policy", "report")
	lines := v["lines"].([]any)
	require.Len(t, lines, 2)
	mismatch, replay := lines[0].(map[string]any), lines[1].(map[string]any)
	require.Equal(t, []any{"MISMATCH", 1.0, 1.0}, []any{mismatch["would_be"], mismatch["calls"], mismatch["keys"]})
	require.Equal(t, []any{"REPLAY", 2.0, 1.0, "k-1", "trace-1"},
		[]any{replay["would_be"], replay["calls"], replay["keys"], replay["example_key"], replay["example_trace"]})
	require.Regexp(t, `order\.create +REPLAY +2 +1 `, s.do(t, exitOK, "report", "--operation", "order.create").out)
	require.Contains(t, s.do(t, exitOK, "report", "--operation", "order.cancel").err, "nothing")
	require.Regexp(t, `k-1 +acme +order\.cancel, order\.create`, s.do(t, exitOK, "reused").out)
	require.Contains(t, s.do(t, exitOK, "bypassed").err, "nothing to reconcile", "shadow's replays need nobody")

	a = s.do(t, exitOK, append([]string{"set", "--operation", "order.create", "--percentage", "5"}, why...)...)
	require.Contains(t, a.err, "now:  order.create  shadow")
	require.Contains(t, a.err, "then: order.create  enforce  5 %  -  off  500ms")
	require.Regexp(t, `order\.create +enforce +5 % +- +off +500ms +\S+ +ada +release 4\.2`, s.do(t, exitOK, "list").out)
	s.do(t, exitOK, append([]string{"set", "--operation", "order.create", "--percentage", "100", "--strategy", "strict", "--wait", "0", "--local", "declared"}, why...)...)
	line := object(t, s.url, exitOK, "policy", "list")["policies"].([]any)[0].(map[string]any)
	require.Equal(t, []any{"enforce", 100.0, "STRICT", 0.0, nil}, []any{line["enforcement"], line["percentage"], line["strategy"], line["wait_seconds"], line["local_front"]})
	res, err := s.call(t, "order.create", "k-1", "{}")
	require.NoError(t, err)
	require.True(t, res.Replayed)

	s.do(t, exitOK, append([]string{"remove", "--operation", "order.create"}, why...)...)
	require.Contains(t, s.do(t, exitOK, append([]string{"remove", "--operation", "order.create"}, why...)...).out, "there is none")
	history := s.do(t, exitOK, "history").out
	for _, part := range []string{
		"enforcement shadow, percentage 100, local_front false, wait 00:00:00.5", "enforcement shadow -> enforce, percentage 100 -> 5",
		"percentage 5 -> 100, strategy declared -> STRICT, local_front false -> declared, wait 00:00:00.5 -> 00:00:00", "removed, was enforce", "ada",
	} {
		require.Contains(t, history, part)
	}
	changes := object(t, s.url, exitOK, "policy", "history", "--limit", "1")["changes"].([]any)
	require.Len(t, changes, 1)
	require.Nil(t, changes[0].(map[string]any)["after"])
	require.Equal(t, "release 4.2", changes[0].(map[string]any)["reason"])
}

// The kill switch: asked for twice, found by doctor, and what it let through is reconciled.
func TestRehearsal_KillSwitch(t *testing.T) {
	t.Parallel()
	s := newService(t)
	off := []string{"off", "--prefix", "order.", "--reason", "incident 17", "--actor", "ada"}
	before := policiesOf(t, s.pool)
	for _, no := range []string{"", "no\n", "y\n"} {
		a := pgonce(t, s.url, no, append([]string{"policy"}, off...)...)
		require.Equal(t, exitRefused, a.code)
		require.Contains(t, a.err, "IS EXECUTED AGAIN")
		require.Contains(t, a.err, "not confirmed: nothing was changed")
	}
	require.Equal(t, before, policiesOf(t, s.pool))
	s.do(t, exitOK, "set", "--operation", "order.cancel", "--enforcement", "enforce", "--reason", "never off", "--yes")
	a := s.do(t, exitOK, append(off, "--yes")...)
	require.Contains(t, a.err, "These are narrower, and stay as they are: order.cancel (enforce)")

	for range 2 {
		for _, value := range []string{"k-1", "k-2", "k-3"} {
			_, err := s.call(t, "order.create", value, "{}")
			require.NoError(t, err)
			if value == "k-3" {
				break
			}
		}
		_, err := s.call(t, "order.cancel", "k-1", "{}")
		require.NoError(t, err)
	}
	_, err := s.pool.Exec(t.Context(), `DELETE FROM idempotency.bypasses WHERE ctid IN (SELECT ctid FROM idempotency.bypasses WHERE key = 'k-3' LIMIT 1)`)
	require.NoError(t, err)
	doctor := pgonce(t, s.url, "", "doctor")
	require.Regexp(t, `WARNING +kill switch +order\.\* is OFF since \S+, by ada: incident 17`, doctor.out)
	require.Regexp(t, `WARNING +bypassed keys +5 executions`, doctor.out)

	a = s.do(t, exitOK, "on", "--prefix", "order.", "--reason", "over", "--yes")
	require.Contains(t, a.err, "refused from now on")
	_, err = s.call(t, "order.create", "k-1", "{}")
	require.ErrorIs(t, err, idempotency.ErrResultExpired)

	keys := object(t, s.url, exitOK, "policy", "bypassed", "--limit", "2")
	require.Len(t, keys["keys"], 2)
	require.Equal(t, true, keys["more"])
	rest := object(t, s.url, exitOK, "policy", "bypassed", "--limit", "2", "--after", keys["after"].(string))["keys"].([]any)
	require.Len(t, rest, 1)
	require.Equal(t, []any{"k-3", 1.0, false}, []any{rest[0].(map[string]any)["key"], rest[0].(map[string]any)["executions"], rest[0].(map[string]any)["duplicate"]})
	twice := s.do(t, exitOK, "bypassed", "--duplicates").out
	require.Regexp(t, `k-1 +acme +order\.create +2 .*DONE TWICE`, twice)
	require.NotContains(t, twice, "k-3")

	get := pgonce(t, s.url, "", "get", "k-3")
	require.Equal(t, exitRefused, get.code)
	require.Contains(t, get.err, "executed while a policy was off (pgonce policy bypassed)")

	reconcile := func(value, as string) string {
		return s.do(t, exitOK, "reconcile", value, "--tenant", "acme", "--operation", "order.create", "--as", as, "--reason", "ticket 4713", "--actor", "ada", "--yes").out
	}
	require.Contains(t, reconcile("k-1", "done"), "2 executions reconciled, done")
	require.Contains(t, reconcile("k-1", "done"), "0 executions reconciled")
	typo := s.do(t, exitOK, "reconcile", "k-l", "--tenant", "acme", "--operation", "order.create", "--as", "done", "--reason", "ticket 4713", "--yes")
	require.NotContains(t, typo.out, "done")
	require.Contains(t, typo.err, "nothing of this key waits for it")
	require.Contains(t, reconcile("k-2", "rerun"), "2 executions")
	_, err = s.call(t, "order.create", "k-1", "{}")
	require.ErrorIs(t, err, idempotency.ErrResultExpired, "done stays done")
	res, err := s.call(t, "order.create", "k-2", "{}")
	require.NoError(t, err)
	require.False(t, res.Replayed)
	res, err = s.call(t, "order.create", "k-2", "{}")
	require.NoError(t, err)
	require.True(t, res.Replayed)
	left := object(t, s.url, exitOK, "policy", "bypassed")["keys"].([]any)
	require.Len(t, left, 1)
	require.Len(t, object(t, s.url, exitOK, "policy", "bypassed", "--reconciled")["keys"], 2)
	require.Equal(t, []string{"ada ticket 4713"}, column[string](t, s.pool,
		`SELECT DISTINCT actor || ' ' || reason FROM idempotency.attempts WHERE event = 'OPERATOR' AND key IN ('k-1', 'k-2')`))
	require.Len(t, column[int64](t, s.pool, `SELECT id FROM idempotency.attempts WHERE event = 'OPERATOR'`), 4)
}

func policiesOf(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return column[string](t, pool, `SELECT p::text FROM idempotency.policies AS p UNION ALL SELECT c::text FROM idempotency.policy_changes AS c`)
}

func TestPolicy_WrongCommandLines(t *testing.T) {
	t.Parallel()
	s := newService(t)
	before := policiesOf(t, s.pool)
	for _, args := range [][]string{
		{"set", "--reason", "x", "--enforcement", "shadow"},
		{"set", "--all", "--operation", "order.create", "--reason", "x", "--enforcement", "shadow"},
		{"set", "--all", "--reason", "x"},
		{"set", "--all", "--reason", " ", "--enforcement", "shadow"},
		{"set", "--all", "--enforcement", "shadow"},
		{"set", "--all", "--reason", "x", "--enforcement", "off"},
		{"set", "--all", "--reason", "x", "--enforcement", "sometimes"},
		{"set", "--all", "--reason", "x", "--percentage", "101"},
		{"set", "--all", "--reason", "x", "--enforcement", "shadow", "--percentage", "5"},
		{"set", "--all", "--reason", "x", "--strategy", "CACHE"},
		{"set", "--all", "--reason", "x", "--local", "maybe"},
		{"set", "--all", "--reason", "x", "--wait", "6m"},
		{"set", "--all", "--reason", "x", "--wait", "long"},
		// What a script's variable that was never set makes of it.
		{"set", "--all", "--reason", "x", "--wait", "", "--yes"},
		{"set", "--all", "--reason", "x", "--local", "", "--yes"},
		{"set", "--all", "--reason", "x", "--strategy", "", "--yes"},
		{"set", "--all", "--reason", "x", "--enforcement", "", "--yes"},
		{"off", "--prefix", "", "--reason", "x", "--yes"},
		{"set", "--operation", " ", "--reason", "x", "--enforcement", "shadow"},
		{"off", "--all"},
		{"report", "--last", "-1h"},
		{"bypassed", "--limit", "0"},
		{"reused", "--after", "?"},
		{"reconcile", "k", "--as", "done", "--reason", "x"},
		{"reconcile", "k", "--tenant", "acme", "--operation", "order.create", "--as", "maybe", "--reason", "x"},
	} {
		s.do(t, exitUsage, args...)
	}
	require.Equal(t, before, policiesOf(t, s.pool))
}

// A policy that leased operations do not obey, a name that is nobody's, and what only a newer release knows.
func TestDoctor_PoliciesThatNobodyHonours(t *testing.T) {
	t.Parallel()
	s := newService(t)
	leased(t, s.pool, "pay-1", idempotency.TakeoverManual)
	for _, set := range [][]string{
		{"set", "--prefix", "payment.", "--enforcement", "shadow"}, {"set", "--operation", "order.crate", "--percentage", "5"},
	} {
		s.do(t, exitOK, append(set, "--reason", "x", "--yes")...)
	}
	a := pgonce(t, s.url, "", "doctor")
	require.Regexp(t, `WARNING +policies +payment\.\* says shadow, which payment\.capture does not obey: it is leased`, a.out)
	require.Regexp(t, `NOTE +policies +none of the latest records is of an operation that order\.crate is for`, a.out)
	require.Regexp(t, `NOTE +policies +order\.crate enforces 5 % of the keys`, a.out)

	_, err := s.pool.Exec(t.Context(), `ALTER TABLE idempotency.policies DROP CONSTRAINT policies_enforcement_check;
		ALTER TABLE idempotency.policies DROP CONSTRAINT policies_share_check;
		UPDATE idempotency.policies SET enforcement = 'sampled'`, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	a = pgonce(t, s.url, "", "doctor")
	require.Contains(t, a.out, "no process of this release can honour all of them")
	require.Equal(t, exitRefused, pgonce(t, s.url, "", "policy", "set", "--prefix", "payment.", "--wait", "1s", "--reason", "x", "--yes").code,
		"a row that is half understood is not written anew")
	require.Equal(t, exitRefused, pgonce(t, s.url, "", "policy", "list").code)
}

// What was changed by hand is not shown as done by whoever changed it before.
func TestPolicyList_NamesNobodyForAChangeByHand(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.do(t, exitOK, "set", "--all", "--wait", "1s", "--reason", "release 4.2", "--actor", "ada", "--yes")
	_, err := s.pool.Exec(t.Context(), `UPDATE idempotency.policies SET enforcement = 'off'`)
	require.ErrorContains(t, err, "policies_off_check", "not in her name")
	_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.policies SET enforcement = 'shadow'`)
	require.NoError(t, err)
	line := object(t, s.url, exitOK, "policy", "list")["policies"].([]any)[0].(map[string]any)
	require.Equal(t, []any{"shadow", "", ""}, []any{line["enforcement"], line["actor"], line["reason"]})
	change := object(t, s.url, exitOK, "policy", "history")["changes"].([]any)[0].(map[string]any)
	require.Equal(t, []any{"", ""}, []any{change["actor"], change["reason"]})
	require.NotEmpty(t, change["changed_by"])
	s.do(t, exitOK, "set", "--all", "--enforcement", "enforce", "--reason", "over", "--actor", "ada", "--yes")
	require.Regexp(t, ` ada +over`, s.do(t, exitOK, "list").out)
}

// Removing a policy may be what weakens an operation.
func TestPolicyRemove_SaysWhatCountsThen(t *testing.T) {
	t.Parallel()
	s := newService(t)
	why := []string{"--reason", "x", "--actor", "ada", "--yes"}
	for _, args := range [][]string{
		{"set", "--operation", "order.create", "--enforcement", "enforce"}, {"set", "--prefix", "order.c", "--percentage", "5"}, {"off", "--all"},
	} {
		s.do(t, exitOK, append(args, why...)...)
	}
	for _, step := range []struct{ flags, now, then, warning string }{
		{"--operation order.create", "order.create  enforce  100 %", "order.c*  enforce  5 %", "a duplicate IS EXECUTED"},
		{"--prefix order.c", "order.c*  enforce  5 %", "*  off", "KILL SWITCH"},
		{"--all", "*  off", "enforced as it is declared", ""},
	} {
		args := append([]string{"remove"}, strings.Fields(step.flags)...)
		a := s.do(t, exitRefused, append(args, "--reason", "x")...)
		require.Contains(t, a.err, "nothing was changed")
		a = s.do(t, exitOK, append(args, why...)...)
		require.Contains(t, a.err, "now:  "+step.now)
		require.Contains(t, a.err, "then: "+step.then)
		require.Contains(t, a.err, step.warning)
		if step.warning == "" {
			require.NotContains(t, a.err, "EXECUTED")
		}
	}
	require.Equal(t, "order.create: there is none\n", s.do(t, exitOK, append([]string{"remove", "--operation", "order.create"}, why...)...).out)
}
