package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestGet_ShowsEveryRecordOfAValue(t *testing.T) {
	t.Parallel()
	url := urlOf(audited(t))
	a := pgonce(t, url, "", "get", "k-1001")
	require.Zero(t, a.code, a.err)
	for _, part := range []string{
		"acme  order.create  k-1001", "SUCCESS", `{"order_id": 501, "total": "19.90"}`, "4.2ms", "web-1:4242:9f1c", "mobile",
		"4bf92f3577b34da6a3ce929d0e0e4736", "2026-03-08T09:15:00.000Z", "for ever", "2 (generation 2)", "order.create#",
		"globex  order.create  k-1001", "CREDIT_LIMIT: over the limit by 30.00", "held now       no", "a duplicate gets this failure",
	} {
		if strings.HasPrefix(part, "held now") {
			require.Regexp(t, `held now +no`, a.out)
			continue
		}
		require.Contains(t, a.out, part)
	}

	v := object(t, url, exitOK, "get", "k-1001", "--tenant", "acme")
	keys := v["keys"].([]any)
	require.Len(t, keys, 1)
	key := keys[0].(map[string]any)
	require.Equal(t, "SUCCESS", key["state"])
	require.Equal(t, map[string]any{"order_id": 501.0, "total": "19.90"}, key["record"].(map[string]any)["result"])
	require.Empty(t, key["held_by"])
}

func TestGet_SaysWhatBecomesOfTheKey(t *testing.T) {
	t.Parallel()
	url := urlOf(audited(t))
	for value, want := range map[string]string{
		"k-0800": "EXPIRED|counts as absent",
		"k-0900": "SUCCESS|done, answer gone",
		"k-2001": "TIMEOUT|asks the other side",
		"k-2002": "TIMEOUT|nobody may take over: find out what it did, then `pgonce fail`",
	} {
		state, next, _ := strings.Cut(want, "|")
		a := pgonce(t, url, "", "get", value)
		require.Zero(t, a.code, a.err)
		require.Contains(t, a.out, state)
		require.Contains(t, a.out, next)
	}
	a := pgonce(t, url, "", "get", "k-none")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "there is no record of this key")
	require.Contains(t, a.err, "give --tenant and --operation to see whether it runs right now")
}

// The transactional mode stores nothing before its commit: the lock is all there is to see.
func TestCase_P23_GetNamesWhoHoldsAKeyWithoutARecord(t *testing.T) {
	t.Parallel()
	pool := audited(t)
	key, err := idempotency.NewKey("acme", "order.create", "k-new")
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	_, err = tx.Exec(t.Context(), `SET LOCAL application_name = 'web-7'`)
	require.NoError(t, err)
	a, err := store.AcquireTx(t.Context(), tx, key)
	require.NoError(t, err)
	require.True(t, a.Locked)

	args := []string{"k-new", "--tenant", "acme", "--operation", "order.create"}
	got := pgonce(t, urlOf(pool), "", append([]string{"get"}, args...)...)
	require.Zero(t, got.code, got.err)
	require.Contains(t, got.out, "no record yet")
	require.Regexp(t, `held now +by pid \d+, web-7, .*idle in transaction`, got.out)
	v := object(t, urlOf(pool), exitOK, append([]string{"get"}, args...)...)
	held := v["keys"].([]any)[0].(map[string]any)["held_by"].([]any)
	require.Len(t, held, 1)
	require.Equal(t, "web-7", held[0].(map[string]any)["application"])

	// And nothing can be changed under the owner's feet.
	for _, change := range [][]string{{"fail"}, {"fail", "--force"}, {"expire"}} {
		refused := pgonce(t, urlOf(pool), "", append(append(change, args...), "--reason", "r", "--yes")...)
		require.Equal(t, exitRefused, refused.code)
		require.Contains(t, refused.err, "a transaction holds the key right now")
	}
}

func TestGet_WhatARecordHoldsDoesNotMoveTheCursor(t *testing.T) {
	t.Parallel()
	pool := audited(t)
	_, err := pool.Exec(t.Context(), `UPDATE idempotency.records SET executor = E'a\x1b[2Jb\u202ec' WHERE key = 'k-1002'`)
	require.NoError(t, err)
	for _, command := range []string{"get", "trace"} {
		a := pgonce(t, urlOf(pool), "", command, "k-1002")
		require.Zero(t, a.code, a.err)
		require.Contains(t, a.out, `a\u001b[2Jb\u202ec`)
		require.NotContains(t, a.out, "\x1b")
	}
}

func TestList_ByStateOperationTenantAndAge(t *testing.T) {
	t.Parallel()
	url := urlOf(audited(t))
	keysOf := func(args ...string) (keys []string) {
		v := object(t, url, exitOK, append([]string{"list"}, args...)...)
		require.Equal(t, false, v["more"])
		for _, r := range v["records"].([]any) {
			keys = append(keys, r.(map[string]any)["key"].(string))
		}
		return keys
	}
	require.Len(t, keysOf(), 14)
	require.Equal(t, []string{"k-2001", "k-2002"}, keysOf("--state", "TIMEOUT"))
	require.Equal(t, []string{"k-2001"}, keysOf("--state", "timeout", "--tenant", "acme"))
	require.Empty(t, keysOf("--state", "PROCESSING"))
	require.Equal(t, []string{"k-0800"}, keysOf("--state", "EXPIRED"))
	require.Equal(t, []string{"k-0700", "k-1001", "k-1003", "k-1004"}, keysOf("--state", "FAILED"))
	require.Equal(t, []string{"k-1003", "k-1004"}, keysOf("--younger-than", "150m", "--operation", "order.create"))
	require.Equal(t, []string{"k-1001", "k-1004"}, keysOf("--younger-than", "4h", "--older-than", "90m"))

	a := pgonce(t, url, "", "list", "--state", "TIMEOUT")
	require.Zero(t, a.code, a.err)
	require.Regexp(t, `(?m)^KEY +TENANT +OPERATION +STATE +AGE +ATTEMPT +EXECUTOR +NOTE$`, a.out)
	require.Regexp(t, `(?m)^k-2002 +globex +payment\.capture +TIMEOUT +\S+ +1 +pay-1:88:77aa +MANUAL$`, a.out)
	a = pgonce(t, url, "", "list", "--state", "INIT")
	require.Zero(t, a.code)
	require.Equal(t, "no records\n", a.err)
}

func TestList_PagesGiveEveryRecordOnce(t *testing.T) {
	t.Parallel()
	url := urlOf(audited(t))
	var keys []string
	after := ""
	for range 20 {
		args := []string{"list", "--limit", "4"}
		if after != "" {
			args = append(args, "--after", after)
		}
		v := object(t, url, exitOK, args...)
		records := v["records"].([]any)
		for _, r := range records {
			m := r.(map[string]any)
			keys = append(keys, fmt.Sprint(m["key"], m["tenant"], m["operation"]))
		}
		after = v["after"].(string)
		if v["more"] == false {
			break
		}
		require.Len(t, records, 4)
		require.Contains(t, pgonce(t, url, "", args...).err, "there are more: --after "+after)
	}
	require.Len(t, keys, 14)
	require.IsIncreasing(t, keys)
}

// The question that is asked when something is wrong must not read five million records.
func TestList_StaleAndExpiredAreFoundByIndexes(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `
		INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
			completed_at, expires_at, executor, fingerprint, attempt_token, result_type)
		SELECT 'acme', 'order.create', 'k-' || i, 'SUCCESS', i, i, 1, now(), now(), now(), now() + interval '1 day', 'h',
			decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex'), 'json/1'
		FROM generate_series(1, 20000) AS i`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `ANALYZE idempotency.records`)
	require.NoError(t, err)
	leased(t, pool, "stale", idempotency.TakeoverManual)
	makeStale(t, pool, "stale")

	cfg, err := pgx.ParseConfig(urlOf(pool))
	require.NoError(t, err)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec // as the command's pool
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	read := func() (n int64) {
		// Rows that this transaction has read, by whatever way.
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_stat_get_xact_tuples_returned('idempotency.records'::regclass)
			+ pg_stat_get_xact_tuples_fetched('idempotency.records'::regclass)`).Scan(&n))
		return n
	}
	_, err = conn.Exec(t.Context(), `BEGIN`)
	require.NoError(t, err)
	before := read()
	for _, state := range []idempotency.State{idempotency.StateTimeout, idempotency.StateProcessing, idempotency.StateExpired} {
		_, _, err = store.List(t.Context(), conn, &idempotency.ListFilter{State: state}, 10)
		require.NoError(t, err)
	}
	lines, _, err := store.Find(t.Context(), conn, idempotency.KeyFilter{Value: "k-77"}, 10)
	require.NoError(t, err)
	require.Len(t, lines, 1)
	_, _, err = store.Trace(t.Context(), conn, idempotency.KeyFilter{Value: "k-77"}, 10)
	require.NoError(t, err)
	require.Less(t, read()-before, int64(100), "rows read")
	_, _, err = store.List(t.Context(), conn, &idempotency.ListFilter{State: idempotency.StateFailed}, 10)
	require.NoError(t, err)
	require.Greater(t, read()-before, int64(10_000), "the control: this one reads the table")
}

func TestTrace_ShowsAttemptsAndTheRecord(t *testing.T) {
	t.Parallel()
	url := urlOf(audited(t))
	a := pgonce(t, url, "", "trace", "k-2003")
	require.Zero(t, a.code, a.err)
	require.Regexp(t, `(?m)^acme +payment\.capture +ACQUIRED +PROCESSING +1 +13 +2026-03-08T10:06:00.000Z +pay-1:88:77aa$`, a.out)
	require.Regexp(t, `(?m)^acme +payment\.capture +LEASE_LOST .*pay-2:91:00be +taken over after the end of its lease$`, a.out)
	require.Regexp(t, `(?m)^acme +payment\.capture +TAKEOVER +PROCESSING +2 +14 `, a.out)
	require.Regexp(t, `(?m)^acme +payment\.capture +\(record\) +SUCCESS +2 +14 `, a.out)
	v := object(t, url, exitOK, "trace", "k-2003")
	require.Len(t, v["attempts"], 3)
	require.Len(t, v["records"], 1)

	a = pgonce(t, url, "", "trace", "k-2003", "--limit", "1")
	require.Contains(t, a.err, "there are more attempts")
	require.NotContains(t, a.out, "TAKEOVER")
	a = pgonce(t, url, "", "trace", "k-1002")
	require.Zero(t, a.code, "a success in the transactional mode is its record")
	require.Contains(t, a.out, "(record)")
	require.Equal(t, exitRefused, pgonce(t, url, "", "trace", "k-none").code)
}

func TestUsage_WrongInputIsStatusTwoAndChangesNothing(t *testing.T) {
	t.Parallel()
	pool := audited(t)
	before := everything(t, pool)
	for _, args := range [][]string{
		{"nonsense"},
		{"get"},
		{"get", "a", "b"},
		{"get", ""},
		{"get", "k\x00"},
		{"get", strings.Repeat("k", 256)},
		{"get", "k", "--tenant", strings.Repeat("t", 129)},
		{"get", "k", "--colour"},
		{"list", "more"},
		{"list", "--state", "DONE"},
		{"list", "--limit", "0"},
		{"list", "--limit", "1001"},
		{"list", "--limit", "many"},
		{"list", "--older-than", "-1h"},
		{"list", "--after", "x"},
		{"list", "--after", "WyJhIl0"},
		{"trace", "k", "--limit", "0"},
		{"fail", "k-2001"},
		{"fail", "k-2001", "--yes", "--reason", " "},
		{"fail", "k-2001", "--yes", "--reason", "a\x1b"},
		{"fail", "k-2001", "--yes", "--reason", strings.Repeat("r", 2001)},
		{"fail", "k-2001", "--yes", "--reason", "r", "--actor", "\t"},
		{"fail", "k-2001", "--yes", "--reason", "r", "--retention", "9m"},
		{"fail", "k-2001", "--yes", "--reason", "r", "--retention", "long"},
		{"fail", "k-2001", "--yes", "--reason", "r", "--code", ""},
		{"fail", "k-2001", "--yes", "--reason", "r", "--redis", "http://x"},
		{"fail", "k-2001", "--yes", "--reason", "r", "--redis", "redis://x", "--redis-prefix", "{a}"},
		{"expire", "k-1001"},
		{"expire", "k-1001", "--yes", "--reason", "r"}, // two records
		{"evict", "k-1001", "--tenant", "a", "--operation", "b"},
		{"evict", "k-1001", "--redis", "redis://x"},
		{"migrate", "sideways"},
		{"migrate", "down"},
		{"migrate", "down", "--to", "-1", "--yes"},
		{"migrate", "down", "--to", "99", "--yes"},
		{"doctor", "please"},
	} {
		a := pgonce(t, urlOf(pool), "", args...)
		require.Equal(t, exitUsage, a.code, "%q: %s%s", args, a.out, a.err)
		require.Empty(t, a.out, "%q", args)
		require.True(t, strings.HasPrefix(a.err, "pgonce: ") || strings.Contains(a.err, "\npgonce: "), "%q: %s", args, a.err)
	}
	require.Equal(t, before, everything(t, pool))

	a := pgonce(t, "", "", "get", "k")
	require.Equal(t, exitUsage, a.code)
	require.Contains(t, a.err, "PGONCE_DATABASE_URL")
	a = pgonce(t, "postgres://u:secret@127.0.0.1:1/x?connect_timeout=1", "", "get", "k")
	require.Equal(t, exitRefused, a.code)
	require.NotContains(t, a.err, "secret")
	a = pgonce(t, pgtest.EmptyURL(t), "", "get", "k")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "schema idempotency is missing")
}

func TestHelpAndCompletion(t *testing.T) {
	t.Parallel()
	a := pgonce(t, "", "")
	require.Zero(t, a.code)
	for _, command := range []string{"get", "list", "trace", "fail", "expire", "evict", "migrate", "doctor", "completion"} {
		require.Contains(t, a.out, "\n  "+command)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		a := pgonce(t, "", "", "completion", shell)
		require.Zero(t, a.code)
		require.NotEmpty(t, a.out)
	}
	a = pgonce(t, "", "", "__complete", "list", "--state", "")
	require.Contains(t, a.out, "TIMEOUT")
}
