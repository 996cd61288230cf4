package invariant

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const place = "order.create"

// shop is a database with the orders and records of one operation.
type shop struct {
	*pgxpool.Pool
	orders Orders
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{pgtest.Pool(t), Orders{Table: "public.Orders", KeyColumn: "Key", Operation: place, Tenant: "acme"}}
	s.exec(t, `CREATE TABLE "Orders" ("Key" text, owner text, operation text)`)
	return s
}

func (s *shop) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := s.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func (s *shop) order(t *testing.T, keys ...any) {
	t.Helper()
	for _, key := range keys {
		s.exec(t, `INSERT INTO "Orders" VALUES ($1, 'acme', $2)`, key, place)
	}
}

// record writes a record as the state machine could have left it.
func (s *shop) record(t *testing.T, key, state string) {
	t.Helper()
	s.exec(t, `
		INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
		    completed_at, lease_expires_at, expires_at, fingerprint, attempt_token, executor, takeover, retryable,
		    error_code, error_message, result_type, result)
		SELECT 'acme', $3::text, $1::text, split_part($2::text, ' ', 1), f, f, CASE WHEN i THEN 0 ELSE 1 END, now(), CASE WHEN NOT i THEN now() END,
		       CASE WHEN done THEN now() END, CASE WHEN p THEN now() + interval '1 min' END, now() + interval '1 day',
		       CASE WHEN NOT i THEN decode(repeat('01', 33), 'hex') END, CASE WHEN NOT i THEN decode(md5($1::text), 'hex') END,
		       CASE WHEN NOT i THEN 'test' END, CASE WHEN p OR again THEN 'RERUN' END, again,
		       CASE WHEN failed THEN 'no' END, CASE WHEN failed THEN 'no' END,
		       CASE WHEN done THEN 'raw' END, CASE WHEN done THEN convert_to('result of ' || $1::text, 'UTF8') END
		FROM (SELECT nextval('idempotency.fence') AS f, $2::text = 'INIT' AS i, $2::text = 'PROCESSING' AS p, $2::text LIKE 'FAILED%' AS failed,
		             $2::text = 'SUCCESS' OR $2::text LIKE 'FAILED%' AS done, $2::text = 'FAILED again' AS again) AS x`, key, state, place)
}

func told(key string, outcome Outcome) Told {
	t := Told{Tenant: "acme", Key: key, Outcome: outcome}
	if outcome == Succeeded {
		t.Result = []byte("result of " + key)
	}
	return t
}

// broken checks and returns the violations as text.
func (s *shop) broken(t *testing.T, check Check) (lines []string) {
	t.Helper()
	if check.Orders.Table == "" {
		check.Orders = s.orders
	}
	report, err := check.Run(t.Context(), s.Pool)
	require.NoError(t, err)
	for _, v := range report.Violations {
		lines = append(lines, v.String())
	}
	return lines
}

func TestCheck_ARightRoundPasses(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.order(t, "a", "b", nil, nil) // nil: not of ours
	s.record(t, "a", "SUCCESS")
	s.record(t, "b", "SUCCESS")
	s.record(t, "c", "FAILED")
	s.record(t, "d", "INIT")
	s.record(t, "e", "PROCESSING")
	before, err := Take(t.Context(), s.Pool, place)
	require.NoError(t, err)
	replay := told("a", Succeeded)
	replay.Replayed = true
	check := Check{
		Orders: s.orders, Before: before, AtLeast: 2,
		Told: []Told{
			told("a", Succeeded), replay, told("a", NotDone), told("b", Unknown), told("b", Succeeded), told("c", Failed),
			told("never", NotDone), told("never", Unknown), told("e", NotDone),
		},
	}
	report, err := check.Run(t.Context(), s.Pool)
	require.NoError(t, err)
	require.NoError(t, report.Err())
	require.Equal(t, 2, report.Useful)
	require.Equal(t, 2, report.Orders)
	require.Equal(t, 5, report.Records)
	require.Len(t, report.After.keys, 5)
}

func TestCheck_I1TwoOrders(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.order(t, "a", "a", "a", "b")
	s.record(t, "a", "SUCCESS")
	s.record(t, "b", "SUCCESS")
	require.Equal(t, []string{"I1: acme/a: 3 orders"}, s.broken(t, Check{Told: []Told{told("a", Succeeded)}}))
}

func TestCheck_I2ToldOtherwiseThanRecorded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.order(t, "success", "changed", "dropped", "false failure")
	for _, key := range []string{"success", "changed", "dropped", "false failure"} {
		s.record(t, key, "SUCCESS")
	}
	s.record(t, "failed", "FAILED")
	s.record(t, "running", "PROCESSING")
	s.exec(t, `UPDATE idempotency.records SET result = NULL WHERE key = 'dropped'`)
	changed := told("changed", Succeeded)
	changed.Result = []byte(strings.Repeat("x", 100))
	empty := told("success", Succeeded)
	empty.Result = []byte{}
	require.Equal(t, []string{
		`I2: acme/lost: a client was told "succeeded", there is no record`,
		`I2: acme/failed: a client was told "succeeded", the record says FAILED`,
		`I2: acme/success: a client was told "failed", the record says SUCCESS`,
		`I2: acme/running: a client was told "succeeded", the record says PROCESSING`,
		`I2: acme/changed: a client was told "` + strings.Repeat("x", 80) + `"... (100 bytes), the record has "result of changed"`,
		`I2: acme/dropped: a client was told a result, the record has none`,
		`I2: acme/success: a client was told "", the record has "result of success"`,
		`I2: acme/false failure: every client was told that nothing was done, the record says SUCCESS`,
	}, s.broken(t, Check{Told: []Told{
		told("lost", Succeeded), told("lost", Succeeded), told("failed", Succeeded), told("success", Failed),
		told("running", Succeeded), changed, told("dropped", Succeeded), empty, told("false failure", NotDone),
		told("success", NotDone), told("success", Succeeded),
	}}))
	_, err := (&Check{Orders: s.orders, Told: []Told{{Tenant: "acme", Key: "k"}}}).Run(t.Context(), s.Pool)
	require.ErrorContains(t, err, "no outcome")
}

func TestCheck_I3OrderAndRecordDisagree(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.order(t, "ok", "alone", "failed", "running", "unused")
	s.record(t, "ok", "SUCCESS")
	s.record(t, "empty", "SUCCESS")
	s.record(t, "failed", "FAILED")
	s.record(t, "running", "PROCESSING")
	s.record(t, "unused", "INIT")
	require.Equal(t, []string{
		"I3: acme/alone: an order, but no record",
		"I3: acme/empty: SUCCESS without an order",
		"I3: acme/failed: an order, but the record says FAILED",
		"I3: acme/running: an order, but the record says PROCESSING",
		"I3: acme/unused: an order, but the record says INIT",
	}, s.broken(t, Check{Told: []Told{told("ok", Succeeded)}}))
}

func TestCheck_FloorOfUsefulWork(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.order(t, "a")
	s.record(t, "a", "SUCCESS")
	// One key twice is one; failures and unknown outcomes are none.
	some := []Told{told("a", Succeeded), told("a", Succeeded), told("b", Unknown)}
	require.Equal(t, []string{"floor: only 1 keys succeeded, 2 are the least"}, s.broken(t, Check{Told: some, AtLeast: 2}))
	require.Equal(t, []string{"floor: only 0 keys succeeded, 1 are the least"}, s.broken(t, Check{}))
	require.Empty(t, s.broken(t, Check{AtLeast: -1}))
}

func TestCheck_TenantsAndOperationsByColumn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.orders.Tenant, s.orders.TenantColumn, s.orders.OperationColumn = "", "owner", "operation"
	s.order(t, "a")
	s.exec(t, `INSERT INTO "Orders" VALUES ('a', 'other', $1), ('a', 'acme', 'order.cancel'), ('a', 'acme', 'order.cancel')`, place)
	s.record(t, "a", "SUCCESS")
	other := Told{Tenant: "other", Key: "a", Outcome: Succeeded}
	require.Equal(t, []string{
		`I2: other/a: a client was told "succeeded", there is no record`,
		"I3: other/a: an order, but no record",
	}, s.broken(t, Check{Told: []Told{told("a", Succeeded), other}}))

	s.exec(t, `INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, '{"tenant": "other"}')).* FROM idempotency.records AS r`)
	require.Empty(t, s.broken(t, Check{Told: []Told{told("a", Succeeded), other}}))
}

func TestCheck_OrdersMustBeSaid(t *testing.T) {
	t.Parallel()
	for _, orders := range []Orders{
		{},
		{Table: "t", KeyColumn: "k"},
		{Table: "t", KeyColumn: "k", Operation: "o"},
		{Table: "t", KeyColumn: "k", Operation: "o", Tenant: "x", TenantColumn: "y"},
	} {
		_, err := (&Check{Orders: orders}).Run(t.Context(), nil)
		require.ErrorContains(t, err, "invariant: Orders")
	}
	// Names are names, never SQL.
	s := newShop(t)
	s.orders.KeyColumn = `Key" FROM "Orders"; DROP TABLE "Orders"; --`
	_, err := (&Check{Orders: s.orders}).Run(t.Context(), s.Pool)
	require.ErrorContains(t, err, "42703")
}

func TestReport_ErrorNamesKeysAndInvariants(t *testing.T) {
	t.Parallel()
	require.NoError(t, (&Report{}).Err())
	r := &Report{Useful: 7}
	for range 32 {
		r.Violations = append(r.Violations, Violation{I1, "acme", "k", "2 orders"})
	}
	err := r.Err()
	require.ErrorContains(t, err, "32 violations (7 useful keys")
	require.ErrorContains(t, err, "I1: acme/k: 2 orders\n")
	require.ErrorContains(t, err, "... and 2 more")
	var typed *Error
	require.ErrorAs(t, err, &typed)
	require.Len(t, typed.Violations, 32)
}
