package db_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// Partitions by time would let one key be there twice, and PostgreSQL refuses them for that reason: the unique key does not
// hold the time. Partitions by the key's hash keep it unique.
func TestCase_P19_PartitionsKeepAKeyUnique(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	ctx := t.Context()
	_, err := conn.Exec(ctx, `CREATE TABLE by_time (LIKE idempotency.records INCLUDING ALL) PARTITION BY RANGE (created_at)`)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "0A000", refused.Code)
	require.Contains(t, refused.Message, "unique constraint on partitioned table must include all partitioning columns")

	url := pgtest.EmptyURL(t)
	install := db.InstallSQL()
	begin := strings.Index(install, "CREATE TABLE idempotency.records (")
	end := begin + strings.Index(install[begin:], "\n);") // the end of its columns
	require.Positive(t, begin)
	require.Greater(t, end, begin)
	partitioned := install[:end] + "\n) PARTITION BY HASH (key);" + install[end+len("\n);"):]
	for i := range 4 {
		partitioned += fmt.Sprintf("\nCREATE TABLE idempotency.records_%d PARTITION OF idempotency.records FOR VALUES WITH (MODULUS 4, REMAINDER %d);", i, i)
	}
	conn = connect(t, url)
	_, err = conn.PgConn().Exec(ctx, partitioned).ReadAll()
	require.NoError(t, err)

	// One key before midnight and behind it, by two sessions at a time.
	insert := func(conn *pgx.Conn, key, at string) error {
		_, err := conn.Exec(ctx, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
				completed_at, expires_at, fingerprint, attempt_token, executor, result_type)
			VALUES ('acme', 'order.create', $1, 'SUCCESS', 1, 1, 1, $2::text::timestamptz, $2::text::timestamptz, $2::text::timestamptz, $2::text::timestamptz + interval '3 days',
				idempotency.fingerprint_of('x'), decode(repeat('01', 16), 'hex'), 'h', 'json/1')`, key, at)
		return err
	}
	other := connect(t, url)
	const keys = 50
	var twice int
	for i := range keys {
		var group sync.WaitGroup
		var errs [2]error
		for j, at := range []string{"2026-01-01 23:59:59.999Z", "2026-01-02 00:00:00Z"} {
			session := []*pgx.Conn{conn, other}[j]
			group.Go(func() { errs[j] = insert(session, fmt.Sprint("k", i), at) })
		}
		group.Wait()
		failures := errors.Join(errs[:]...)
		require.ErrorAs(t, failures, &refused)
		require.Equal(t, "23505", refused.Code)
		require.True(t, errs[0] == nil || errs[1] == nil)
		twice++
	}
	require.Equal(t, keys, twice)
	var n int
	require.NoError(t, conn.QueryRow(ctx, `SELECT count(*) FROM idempotency.records`).Scan(&n))
	require.Equal(t, keys, n)

	// The purge goes by keys there: a place is one in each partition.
	store := idempotency.NewStore(pgx.QueryExecModeCacheStatement)
	sharded, err := store.Sharded(ctx, conn)
	require.NoError(t, err)
	require.True(t, sharded)
	for left := int64(keys); left > 0; {
		gone, _, err := store.PurgeSharded(ctx, conn, 20)
		require.NoError(t, err)
		require.Positive(t, gone)
		left -= gone
	}
	sharded, err = store.Sharded(ctx, connect(t, pgtest.URL(t)))
	require.NoError(t, err)
	require.False(t, sharded)
}
