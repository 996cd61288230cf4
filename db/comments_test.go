package db_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// Whoever looks at the schema with psql must find it explained there.
func TestComments_EveryObjectExplainsItself(t *testing.T) {
	t.Parallel()
	silent := column[string](t, pgtest.Pool(t), `
		SELECT 'schema ' || n.nspname FROM pg_namespace AS n
		WHERE n.nspname = 'idempotency' AND obj_description(n.oid, 'pg_namespace') IS NULL
		UNION ALL
		SELECT 'relation ' || c.relname FROM pg_class AS c
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
		  AND obj_description(c.oid, 'pg_class') IS NULL
		UNION ALL
		SELECT 'column ' || c.relname || '.' || a.attname FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
		  AND a.attnum > 0 AND NOT a.attisdropped AND col_description(c.oid, a.attnum) IS NULL
		UNION ALL
		SELECT 'index ' || c.relname FROM pg_class AS c JOIN pg_index AS i ON i.indexrelid = c.oid
		WHERE c.relnamespace = 'idempotency'::regnamespace AND NOT i.indisunique AND obj_description(c.oid, 'pg_class') IS NULL
		UNION ALL
		SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p
		WHERE p.pronamespace = 'idempotency'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
		ORDER BY 1`)
	require.Empty(t, silent, "no comment on these: add COMMENT ON to the migration")
}
