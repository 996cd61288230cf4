package db_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/audittest"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// What a person or a pass asks about one key, one tenant, stale or expired records must not cost what the table costs.
func TestPlans_QuestionsAboutFewRecordsDoNotReadTheTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	fill := audittest.Fill{Records: 200_000, Fingerprint: bytes.Repeat([]byte{1}, 33)}
	require.NoError(t, fill.Run(t.Context(), conn))
	loadAuditFixture(t, conn)

	guide := questionsOf(t, auditDoc)
	asked := map[string]string{
		"one tenant": `SELECT count(*), min(created_at) FROM idempotency.audit WHERE tenant = 'globex'`,
		"one tenant's operation": `SELECT key, state FROM idempotency.audit
			WHERE tenant = 'globex' AND operation = 'order.create' ORDER BY key LIMIT 100`,
		"the stale ones": `SELECT * FROM idempotency.stale`,
		"a batch to purge": `SELECT tenant, operation, key FROM idempotency.records
			WHERE expires_at <= statement_timestamp() AND state <> 'PROCESSING' ORDER BY expires_at LIMIT 1000`,
		"a batch of results to drop": `SELECT tenant, operation, key FROM idempotency.records
			WHERE result_expires_at <= statement_timestamp() AND result IS NOT NULL ORDER BY result_expires_at LIMIT 1000`,
	}
	for _, q := range guide {
		switch q.Number() {
		case "1", "2", "4", "6", "8", "11", "12", "15":
			asked[q.Title] = q.SQL
		case "3":
			asked[q.Title+" (with the tenant)"] = strings.Replace(q.SQL, "WHERE ", "WHERE tenant = 'acme' AND ", 1)
		}
	}
	require.Len(t, asked, 5+8+1)
	for title, sql := range asked {
		requireNotReadAll(t, conn, title, sql)
	}

	// Those that do read it have a remedy in the guide.
	remedies := questionsOf(t, "../docs/big_tables.md")
	for _, q := range guide {
		plan, err := audittest.Explain(t.Context(), conn, q.SQL, false)
		require.NoError(t, err, q.Title)
		if plan.ReadsAll("records") {
			require.True(t, contains(remedies, q.Number()), "docs/big_tables.md says nothing about question %s", q.Title)
		}
	}
	for _, q := range remedies {
		for _, sql := range q.Setup {
			_, err := conn.Exec(t.Context(), sql)
			require.NoError(t, err, q.Title)
		}
		requireNotReadAll(t, conn, q.Title, q.SQL)
	}
}

func questionsOf(t *testing.T, guide string) []audittest.Question {
	t.Helper()
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	questions := audittest.Questions(string(text))
	require.NotEmpty(t, questions)
	return questions
}

func contains(questions []audittest.Question, number string) bool {
	for _, q := range questions {
		if q.Number() == number {
			return true
		}
	}
	return false
}

func requireNotReadAll(t *testing.T, conn *pgx.Conn, title, sql string) {
	t.Helper()
	plan, err := audittest.Explain(t.Context(), conn, sql, false)
	require.NoError(t, err, title)
	for _, table := range []string{"records", "attempts"} {
		if plan.ReadsAll(table) {
			text := strings.Join(column[string](t, conn, "EXPLAIN "+sql), "\n")
			require.Failf(t, title, "reads the whole table %s:\n%s", table, text)
		}
	}
}
