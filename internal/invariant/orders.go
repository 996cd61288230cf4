package invariant

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// query is a SELECT of (tenant, key) of every order. $1 is the operation, $2 the tenant. An order without a key is nobody's.
func (o Orders) query() (string, error) {
	switch {
	case o.Table == "" || o.KeyColumn == "" || o.Operation == "":
		return "", errors.New("invariant: Orders: Table, KeyColumn and Operation must be set")
	case (o.Tenant == "") == (o.TenantColumn == ""):
		return "", errors.New("invariant: Orders: set one of Tenant and TenantColumn")
	}
	column := func(name string) string { return pgx.Identifier{name}.Sanitize() + "::text" }
	tenant := "$2::text"
	if o.TenantColumn != "" {
		tenant = column(o.TenantColumn)
	}
	sql := fmt.Sprintf(`SELECT %s COLLATE "C" AS tenant, %s COLLATE "C" AS key FROM %s WHERE %s IS NOT NULL`,
		tenant, column(o.KeyColumn), pgx.Identifier(strings.Split(o.Table, ".")).Sanitize(), column(o.KeyColumn))
	if o.OperationColumn != "" {
		sql += " AND " + column(o.OperationColumn) + " = $1::text"
	}
	return sql, nil
}

// records is a SELECT of the operation's records, of the one tenant where there is one.
const records = `SELECT tenant, key, state, result, result_type FROM idempotency.records
	WHERE operation = $1::text AND ($2::text = '' OR tenant = $2::text)`

func (c *Check) count(ctx context.Context, tx pgx.Tx, orders string, report *Report) error {
	return tx.QueryRow(ctx, `SELECT (SELECT count(*) FROM (`+orders+`) AS o), (SELECT count(*) FROM (`+records+`) AS r)`,
		c.Orders.Operation, c.Orders.Tenant).Scan(&report.Orders, &report.Records)
}

// oneOrder is I1.
func (c *Check) oneOrder(ctx context.Context, tx pgx.Tx, orders string, report *Report) error {
	return c.violations(ctx, tx, report, I1, `
		SELECT tenant, key, count(*) || ' orders' FROM (`+orders+`) AS o
		WHERE $1::text IS NOT NULL AND $2::text IS NOT NULL -- PostgreSQL refuses a parameter that is nowhere
		GROUP BY tenant, key HAVING count(*) > 1 ORDER BY tenant, key`)
}

// successIffOrder is I3.
func (c *Check) successIffOrder(ctx context.Context, tx pgx.Tx, orders string, report *Report) error {
	return c.violations(ctx, tx, report, I3, `
		SELECT COALESCE(o.tenant, r.tenant), COALESCE(o.key, r.key),
		       CASE WHEN o.key IS NULL THEN 'SUCCESS without an order'
		            ELSE 'an order, but ' || COALESCE('the record says ' || r.state, 'no record') END
		FROM (SELECT DISTINCT tenant, key FROM (`+orders+`) AS o) AS o
		FULL JOIN (`+records+`) AS r ON r.tenant = o.tenant AND r.key = o.key
		WHERE (o.key IS NOT NULL) <> COALESCE(r.state = 'SUCCESS', false)
		ORDER BY 1, 2`)
}

// violations runs a query of (tenant, key, what).
func (c *Check) violations(ctx context.Context, tx pgx.Tx, report *Report, invariant, sql string) error {
	rows, err := tx.Query(ctx, sql, c.Orders.Operation, c.Orders.Tenant)
	if err != nil {
		return err
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (v Violation, err error) {
		v.Invariant = invariant
		err = row.Scan(&v.Tenant, &v.Key, &v.What)
		return v, err
	})
	report.Violations = append(report.Violations, found...)
	return err
}

// asTold is I2. A client that was told of an outcome can find it recorded; and where every client of a key was told that
// nothing was done, nothing was.
func (c *Check) asTold(ctx context.Context, tx pgx.Tx, _ string, report *Report) error {
	type stored struct {
		state  string
		result []byte
	}
	recorded := map[[2]string]stored{}
	rows, err := tx.Query(ctx, records, c.Orders.Operation, c.Orders.Tenant)
	if err != nil {
		return err
	}
	var tenant, key, state string
	var result []byte
	var resultType *string
	if _, err := pgx.ForEachRow(rows, []any{&tenant, &key, &state, &result, &resultType}, func() error {
		recorded[[2]string{tenant, key}] = stored{state, result}
		return nil
	}); err != nil {
		return err
	}
	maybeDone, reported := map[[2]string]bool{}, map[Violation]bool{}
	for _, t := range c.Told {
		if t.Outcome != NotDone {
			maybeDone[[2]string{t.Tenant, t.Key}] = true
		}
	}
	for _, t := range c.Told {
		key := [2]string{t.Tenant, t.Key}
		r, found := recorded[key]
		var what string
		switch want := map[Outcome]string{Succeeded: "SUCCESS", Failed: "FAILED"}[t.Outcome]; {
		case t.Outcome == Unknown:
		case t.Outcome == NotDone:
			if found && !maybeDone[key] && (r.state == "SUCCESS" || r.state == "FAILED") {
				what = "every client was told that nothing was done, the record says " + r.state
			}
		case want == "":
			return fmt.Errorf("a client of %s/%s was told %q, which is no outcome", t.Tenant, t.Key, t.Outcome)
		case !found:
			what = fmt.Sprintf("a client was told %q, there is no record", t.Outcome)
		case r.state != want:
			what = fmt.Sprintf("a client was told %q, the record says %s", t.Outcome, r.state)
		case t.Result != nil && r.result == nil:
			what = "a client was told a result, the record has none"
		case t.Result != nil && !bytes.Equal(t.Result, r.result):
			what = fmt.Sprintf("a client was told %s, the record has %s", short(t.Result), short(r.result))
		}
		if v := (Violation{Invariant: I2, Tenant: t.Tenant, Key: t.Key, What: what}); what != "" && !reported[v] {
			reported[v] = true
			report.Violations = append(report.Violations, v)
		}
	}
	return nil
}

// short is bytes for people.
func short(b []byte) string {
	if len(b) > 80 {
		return fmt.Sprintf("%.80q... (%d bytes)", b, len(b))
	}
	return fmt.Sprintf("%q", b)
}
