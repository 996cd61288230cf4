package db

import (
	"context"
	_ "embed" // catalog.txt
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed catalog.txt
var catalog string

// What is safe because of the schema: types and rules of columns, keys, valid indexes, the trigger switched on, the functions'
// text. The same on every version of PostgreSQL, so nothing here is printed by the server (pg_get_...def changes).
const readCatalog = `
SELECT line FROM (
	SELECT format('relation %s: %s', c.relname, c.relkind) AS line
	FROM pg_class AS c WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
	UNION ALL
	SELECT format('column %s.%s: %s%s%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
		CASE WHEN a.attnotnull THEN ' NOT NULL' END, CASE WHEN a.atthasdef OR a.attidentity <> '' THEN ' DEFAULT' END)
	FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'c') AND a.attnum > 0 AND NOT a.attisdropped
	UNION ALL
	SELECT format('constraint %s: %s%s', k.conname, k.contype, CASE WHEN NOT k.convalidated THEN ' NOT VALID' END)
	FROM pg_constraint AS k WHERE k.connamespace = 'idempotency'::regnamespace AND k.contype <> 'n' -- rows of their own from 18 on
	UNION ALL
	SELECT format('index %s: on %s (%s)%s%s%s', c.relname, t.relname,
		(SELECT string_agg(COALESCE(a.attname, '?'), ', ' ORDER BY n) FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS u(attnum, n)
			LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = u.attnum),
		CASE WHEN i.indisunique THEN ' UNIQUE' END, CASE WHEN i.indpred IS NOT NULL THEN ' WHERE' END,
		CASE WHEN NOT (i.indisvalid AND i.indisready) THEN ' INVALID' END)
	FROM pg_class AS c JOIN pg_index AS i ON i.indexrelid = c.oid JOIN pg_class AS t ON t.oid = i.indrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace
	UNION ALL
	SELECT format('function %s(%s): %s', p.proname, pg_get_function_identity_arguments(p.oid),
		CASE WHEN p.proname = 'schema_version' THEN 'a number' ELSE md5(p.prosrc) END)
	FROM pg_proc AS p WHERE p.pronamespace = 'idempotency'::regnamespace
	UNION ALL
	SELECT format('trigger %s: on %s, %s', t.tgname, c.relname, CASE WHEN t.tgenabled IN ('O', 'A') THEN 'enabled' ELSE 'DISABLED' END)
	FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND NOT t.tgisinternal
	UNION ALL
	SELECT format('sequence %s: cache %s, increment %s%s', c.relname, s.seqcache, s.seqincrement, CASE WHEN s.seqcycle THEN ', CYCLE' END)
	FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid WHERE c.relnamespace = 'idempotency'::regnamespace
) AS lines
ORDER BY line COLLATE "C"`

// Catalog returns what the schema idempotency consists of, one line each: name, colon, what it is.
func Catalog(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	rows, err := pool.Query(ctx, readCatalog, pgx.QueryExecModeExec)
	if err != nil {
		return "", fmt.Errorf("db: read catalog: %w", err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", fmt.Errorf("db: read catalog: %w", err)
	}
	return strings.Join(lines, "\n") + "\n", nil
}

// Difference is something of the schema that is not as the migrations leave it.
type Difference struct {
	What string // "index records_stale_idx"
	Want string // empty: it does not belong to the schema, and does no harm there
	Have string // empty: it is missing
}

func (d Difference) String() string {
	switch {
	case d.Have == "":
		return d.What + " is missing"
	case d.Want == "":
		return d.What + " is not one of pgonce's"
	}
	return fmt.Sprintf("%s is %q, should be %q", d.What, d.Have, d.Want)
}

// Validate compares the schema with what the migrations of this package leave. It only reads. Objects that others have added
// are differences too, without a Want. The version must be SchemaVersion: another one differs on purpose.
func Validate(ctx context.Context, pool *pgxpool.Pool) ([]Difference, error) {
	found, err := Catalog(ctx, pool)
	if err != nil {
		return nil, err
	}
	want, have := byName(catalog), byName(found)
	var differences []Difference
	for what, is := range want {
		if have[what] != is {
			differences = append(differences, Difference{What: what, Want: is, Have: have[what]})
		}
	}
	for what, is := range have {
		if _, known := want[what]; !known {
			differences = append(differences, Difference{What: what, Have: is})
		}
	}
	slices.SortFunc(differences, func(a, b Difference) int { return strings.Compare(a.What, b.What) })
	return differences, nil
}

func byName(lines string) map[string]string {
	named := map[string]string{}
	for line := range strings.Lines(lines) {
		what, is, _ := strings.Cut(strings.TrimSpace(line), ": ")
		named[what] = is
	}
	return named
}
