package txn_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// situations are the rows of the guide's table: how a key comes to be so.
var situations = []struct {
	name  string
	used  string // the enforcement under which the key was used before; empty: it was not
	then  string // SQL on what that left, with the key as $1
	holds bool   // another process runs the key
	body  string
}{
	{name: "new", body: "{}"},
	{name: "done, same payload", used: "enforce", body: "{}"},
	{name: "done, other payload", used: "enforce", body: "other"},
	{
		name: "done, result gone", used: "enforce", body: "{}",
		then: `UPDATE idempotency.records SET result_expires_at = statement_timestamp() - interval '1 s' WHERE key = $1`,
	},
	{
		name: "recorded by a newer release", used: "enforce", body: "{}",
		then: `UPDATE idempotency.records SET fingerprint = set_byte(fingerprint, 0, 99) WHERE key = $1`,
	},
	{name: "running", holds: true, body: "{}"},
	{name: "executed under `off`", used: "off", body: "{}"},
	{name: "leased, running", then: `SELECT idempotency.acquire('-', 'order.create', $1, idempotency.fingerprint_of('{}'))`, body: "{}"},
}

// hold has another process run the key until the test ends.
func hold(t *testing.T, p *policyShop, key string) {
	t.Helper()
	inside, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	other := newRunner(t, p.pool)
	go func() {
		_, err := txn.WithIdempotency(context.WithoutCancel(t.Context()), other, request(t, key, "{}"), func(context.Context, pgx.Tx) (order, error) {
			close(inside)
			<-leave
			return order{}, nil
		})
		done <- err
	}()
	t.Cleanup(func() {
		close(leave)
		require.NoError(t, <-done)
	})
	<-inside
}

// seen names what became of a call, as the guide does.
func (p *policyShop) seen(t *testing.T, key, body string) string {
	t.Helper()
	before := len(p.bypasses(t, key))
	res, err := p.place(t.Context(), request(t, key, body))
	logged := p.bypasses(t, key)[before:]
	for name, sentinel := range map[string]error{
		"ErrMismatch": idempotency.ErrMismatch, "ErrResultExpired": idempotency.ErrResultExpired, "ErrNewerRecord": idempotency.ErrNewerRecord,
		"ErrInProgress": idempotency.ErrInProgress, "ErrWrongMode": idempotency.ErrWrongMode,
	} {
		if errors.Is(err, sentinel) {
			require.Empty(t, logged)
			return "`" + name + "`"
		}
	}
	require.NoError(t, err)
	switch {
	case res.Replayed:
		require.Empty(t, logged)
		return "replay"
	case len(logged) == 0:
		require.NotZero(t, res.Record.Fence)
		return "runs, recorded"
	}
	require.Len(t, logged, 1)
	return "**runs**, logged as `" + strings.Fields(logged[0])[1] + "`"
}

// Every cell of docs/policies.md.
func TestPolicy_TheTableOfTheGuide(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/policies.md")
	require.NoError(t, err)
	rows := 0
	for _, s := range situations {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			cells := []string{s.name}
			for _, enforcement := range []string{"enforce", "shadow", "off"} {
				p := newPolicyShop(t)
				if s.used != "" {
					p.policy(t, "all", "", s.used)
					p.ok(t, "k")
				}
				if s.then != "" {
					p.exec(t, s.then, "k")
				}
				if s.holds {
					hold(t, p, "k")
				}
				p.policy(t, "all", "", enforcement)
				p.exec(t, `UPDATE idempotency.policies SET wait = '0', actor = 'ada', reason = 'x'`)
				_, err := p.policies.RunOnce(t.Context())
				require.NoError(t, err)
				cells = append(cells, p.seen(t, "k", s.body))
			}
			line := "| " + strings.Join(cells, " | ") + " |"
			require.True(t, strings.Contains(string(text), line+"\n"), "not in docs/policies.md: %s", line)
		})
		rows++
	}
	require.Equal(t, rows, strings.Count(strings.Split(strings.Split(string(text), "## What becomes of a call")[1], "\n- ")[0], "\n| ")-1)
}

// The guide's SQL runs, and finds what is there.
func TestPolicy_TheQuestionsOfTheGuide(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "all", "", "shadow")
	p.ok(t, "s")
	p.ok(t, "s")
	p.policy(t, "all", "", "off")
	p.ok(t, "o")
	p.ok(t, "o")
	p.ok(t, "r")
	p.exec(t, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at, executor,
		fingerprint, attempt_token, result_type, result) SELECT tenant, operation, key, 'SUCCESS', 1, 1, 1, began_at, began_at, bypassed_at, executor,
		fingerprint, attempt_token, 'json/1', '{}' FROM idempotency.bypasses WHERE key = 'r'`)
	text, err := os.ReadFile("../docs/policies.md")
	require.NoError(t, err)
	_, sql, _ := strings.Cut(string(text), "```sql\n")
	sql, _, _ = strings.Cut(sql, "```")
	var found []string
	for question := range strings.SplitSeq(strings.TrimSpace(sql), ";") {
		if strings.TrimSpace(question) == "" {
			continue
		}
		rows, err := p.direct.Query(t.Context(), question)
		require.NoError(t, err, question)
		for rows.Next() {
			values, err := rows.Values()
			require.NoError(t, err)
			found = append(found, fmt.Sprint(values...))
		}
		require.NoError(t, rows.Err(), question)
	}
	all := strings.Join(found, "\n")
	require.Len(t, found, 1+1+1+2, all)
	require.Contains(t, found[0], "REPLAY")
	require.Contains(t, found[1], "order.create")
	require.Contains(t, found[2], "SUCCESS")
	require.Contains(t, found[3], "off")
	require.Contains(t, found[4], "ticket 4711")
}
