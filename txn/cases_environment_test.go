package txn_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// Promise D14. `make matrix` runs it with the server's clock an hour ahead and an hour behind: a retention of ten minutes
// is then long over, or far from over, by the clock of this process.
func TestCase_D14_ExpiryIsByPostgresClockAlone(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *txn.Config) { c.Operations[0].Retention = idempotency.MinRetention })
	var server time.Time
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&server))
	require.WithinDuration(t, time.Now().Add(pgtest.Env().ClockOffset), server, 5*time.Minute, "the environment's clock")

	req := request(t, "k", "body")
	first, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.WithinDuration(t, server, first.Record.CompletedAt, time.Minute)
	require.Equal(t, idempotency.MinRetention, first.Record.ExpiresAt.Sub(first.Record.CompletedAt))
	again, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.True(t, again.Replayed, "alive by PostgreSQL's clock")
	require.Equal(t, first.Record, again.Record)

	s.expire(t, req, "1 minute")
	again, err = s.place(t.Context(), req)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	s.expire(t, req, "-1 microsecond")
	next, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.False(t, next.Replayed, "expired by PostgreSQL's clock")
	require.Greater(t, next.Record.Generation, first.Record.Generation)
	require.Equal(t, 2, s.orders(t, "k"))

	// The same for a transaction of the caller.
	tx := s.begin(t, pgx.TxOptions{})
	joined, err := s.join(t.Context(), tx, req)
	require.NoError(t, err)
	require.True(t, joined.Replayed)
}

// In transactional mode nothing of an owner that dies is left; the leased half of the case belongs to the leased mode.
func TestCase_P23_DuplicatesOfALongTransactionHoldNothingAndADeadOwnerFreesTheKey(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *txn.Config) { c.MaxRetries = -1 })
	impatient, req := s.replica(t, impatient), request(t, "k", "body")
	owner := s.hold(t, req)
	for range 30 {
		_, err := impatient.place(t.Context(), req)
		var busy *idempotency.InProgressError
		require.ErrorAs(t, err, &busy)
		require.GreaterOrEqual(t, busy.RetryAfter, time.Second)
		require.Zero(t, impatient.pool.Stat().AcquiredConns())
	}
	var inTransaction int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL`).Scan(&inTransaction))
	require.Equal(t, 1, inTransaction, "the owner's")

	s.terminate(t.Context(), t, `backend_type = 'client backend' AND xact_start IS NOT NULL`)
	res, err := impatient.place(t.Context(), req)
	require.NoError(t, err, "the key is free")
	require.False(t, res.Replayed)
	lost := owner.letGo()
	if lost.err == nil { // it found the other's record when it asked what became of its own
		require.True(t, lost.Replayed)
		require.Equal(t, res.Value, lost.Value)
	}
	require.Equal(t, 1, s.orders(t, "k"))
}
