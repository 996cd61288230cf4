package db_test

import (
	"context"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

var update = flag.Bool("update", false, "write the answers into docs/audit.md instead of comparing them")

const auditDoc = "../docs/audit.md"

// question is a heading of the guide with its SQL and the answer printed below it.
var question = regexp.MustCompile("(?ms)^## ([^\n]+)\n(.*?\n)```sql\n(.*?\n)```\n```text\n(.*?\n)```\n")

func TestAuditGuide_AnswersAreTrue(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	loadAuditFixture(t, conn)
	holdAuditKey(t, conn)

	text, err := os.ReadFile(auditDoc)
	require.NoError(t, err)
	questions := question.FindAllSubmatchIndex(text, -1)
	require.GreaterOrEqual(t, len(questions), 10)
	require.Len(t, questions, strings.Count(string(text), "```sql\n"), "a question without an answer")

	updated, end := "", 0
	for _, q := range questions {
		title, sql := string(text[q[2]:q[3]]), string(text[q[6]:q[7]])
		got := answer(t, conn, sql)
		if !*update {
			require.Equal(t, string(text[q[8]:q[9]]), got, title)
		}
		updated, end = updated+string(text[end:q[8]])+got, q[9]
	}
	if *update {
		require.NoError(t, os.WriteFile(auditDoc, []byte(updated+string(text[end:])), 0o644))
	}
}

func loadAuditFixture(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	fixture, err := os.ReadFile("testdata/audit.sql")
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), string(fixture))
	require.NoError(t, err)
}

// holdAuditKey is somebody who runs a key.
func holdAuditKey(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	cfg := conn.Config().Copy()
	cfg.RuntimeParams["application_name"] = "web-2"
	runner, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = runner.Close(context.Background()) })
	tx, err := runner.Begin(t.Context())
	require.NoError(t, err)
	require.Equal(t, []bool{true}, column[bool](t, tx,
		`SELECT pg_try_advisory_xact_lock(idempotency.lock_id('acme', 'order.create', 'k-1005'))`))
}

// answer runs a query and prints rows as psql does.
func answer(t *testing.T, conn *pgx.Conn, sql string) string {
	t.Helper()
	results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll() // as text, as psql gets it
	require.NoError(t, err, sql)
	require.Len(t, results, 1)
	table := [][]string{{}}
	for _, field := range results[0].FieldDescriptions {
		table[0] = append(table[0], field.Name)
	}
	for _, values := range results[0].Rows {
		var line []string
		for _, value := range values {
			line = append(line, string(value))
		}
		table = append(table, line)
	}
	widths := make([]int, len(table[0]))
	for _, line := range table {
		for i, cell := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var out strings.Builder
	for n, line := range table {
		rule := make([]string, len(line))
		for i, cell := range line {
			line[i] = cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			rule[i] = strings.Repeat("-", widths[i])
		}
		out.WriteString(strings.TrimRight(strings.Join(line, " | "), " ") + "\n")
		if n == 0 {
			out.WriteString(strings.Join(rule, "-+-") + "\n")
		}
	}
	return out.String()
}
