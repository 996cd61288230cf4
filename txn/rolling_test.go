package txn_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
)

// What the next release's migration may do while this release runs: add. Each is a transaction of its own, as goose's are.
var nextMigration = []string{
	`ALTER TABLE idempotency.records ADD COLUMN region text, ADD COLUMN weight bigint NOT NULL DEFAULT 0`,
	`ALTER TABLE idempotency.records ADD CONSTRAINT records_region_check CHECK (octet_length(region) <= 64) NOT VALID`,
	`ALTER TABLE idempotency.records VALIDATE CONSTRAINT records_region_check`,
	`CREATE INDEX CONCURRENTLY records_region_idx ON idempotency.records (region) WHERE region IS NOT NULL`,
	`CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 1000 $$`,
}

// Two instances take orders and their duplicates before, while and after the next release's migration runs: one order for each
// key, no error, and what was recorded before is replayed after.
func TestCase_D05_AMigrationUnderTwoInstances(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	other := s.replica(t)
	var stop atomic.Bool
	var group sync.WaitGroup
	var calls, keys atomic.Int64
	for i := range 4 {
		group.Go(func() {
			for n := 0; !stop.Load(); n++ {
				key := fmt.Sprintf("k-%d-%d", i, n)
				keys.Add(1)
				for _, one := range []*shop{s, other, s} {
					res, err := one.place(t.Context(), request(t, key, "{}"))
					if err != nil {
						t.Errorf("%s: %v", key, err)
						return
					}
					calls.Add(1)
					if res.Record.State != idempotency.StateSuccess {
						t.Errorf("%s: %s", key, res.Record.State)
					}
				}
			}
		})
	}
	before, err := s.place(t.Context(), request(t, "before", "{}"))
	require.NoError(t, err)
	enough := func(more int64) {
		t.Helper()
		from := keys.Load()
		require.Eventually(t, func() bool { return keys.Load() >= from+more }, 60*time.Second, 5*time.Millisecond)
	}
	enough(20)
	for _, sql := range nextMigration {
		s.exec(t, sql)
		enough(5)
	}
	stop.Store(true)
	group.Wait()
	var orders, distinct int64
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT key) FROM orders`).Scan(&orders, &distinct))
	require.Equal(t, keys.Load()+1, orders)
	require.Equal(t, orders, distinct)
	require.Equal(t, 3*keys.Load(), calls.Load())
	again, err := other.place(context.WithoutCancel(t.Context()), request(t, "before", "{}"))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, before.Value, again.Value)
	t.Logf("%d keys, %d calls, %d statements of a migration", keys.Load(), calls.Load(), len(nextMigration))
}

// What keeps a key unique is never taken away by a migration: an instance that relies on it may still run.
func TestCase_D05_MigrationsOnlyAdd(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../db/migrations/*.sql")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(files), 4)
	down := regexp.MustCompile(`(?s)-- \+goose Down.*`)
	takes := regexp.MustCompile(`(?i)\b(drop\s+(constraint|index|table|column|trigger)|rename\s|alter\s+column\s+\w+\s+type|truncate)\b`)
	events := regexp.MustCompile(`(BEFORE|OR) TRUNCATE ON idempotency\.`) // of a trigger that refuses it
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		up := events.ReplaceAllString(down.ReplaceAllString(string(text), ""), "")
		require.Empty(t, takes.FindAllString(up, -1), file)
	}
}
