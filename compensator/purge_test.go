package compensator_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
)

// expired leaves records past their retention.
func (s *shop) expired(t *testing.T, records int) {
	t.Helper()
	s.exec(t, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
			expires_at, executor, fingerprint, attempt_token, result_type)
		SELECT 'acme', 'order.create', md5(i::text), 'SUCCESS', i, i, 1, now(), now(), now(), now() - interval '1 s', 'h',
			idempotency.fingerprint_of('x'), decode(repeat('02', 16), 'hex'), 'json/1'
		FROM generate_series(1, $1::int) AS i`, records)
}

// S14: results first, then records, by PostgreSQL's clock; and never what is running or kept for ever.
func TestCase_S14_Purge(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
			result_expires_at, expires_at, executor, fingerprint, attempt_token, result_type, result)
		SELECT 'acme', 'order.create', 'k-' || i, 'SUCCESS', i, i, 1, now(), now(), now(),
			CASE WHEN i % 2 = 0 THEN statement_timestamp() - interval '1 s' END,
			CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN statement_timestamp() - interval '1 s' ELSE statement_timestamp() + interval '1 h' END,
			'h', idempotency.fingerprint_of('x'), decode(repeat('02', 16), 'hex'), 'json/1', '{}'
		FROM generate_series(1, 4000) AS i`)
	s.abandon(t, "manual", "runs", idempotency.TakeoverManual)
	s.exec(t, `INSERT INTO idempotency.steps (tenant, operation, key, generation, name, fence, result_type, result)
		SELECT tenant, operation, key, generation, 's', fence, 'json/1', '1' FROM idempotency.records`)
	report, err := s.open(t, func(c *compensator.Config) { c.Batch = 300 }).RunOnce(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2000, report.ResultsDropped)
	require.EqualValues(t, 1000, report.Purged)
	require.Equal(t, 3001, s.count(t, `SELECT count(*) FROM idempotency.records`))
	require.Equal(t, 3001, s.count(t, `SELECT count(*) FROM idempotency.steps`))
	require.Equal(t, 2000, s.count(t, `SELECT count(*) FROM idempotency.audit WHERE result_dropped`), "tombstones stay")
	require.Equal(t, "PROCESSING", s.state(t, "runs"))
}

// Issued tokens that nobody used in time go too; the others stay.
func TestPurge_UnusedTokens(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, value := range []string{"used in time", "late", "new"} {
		key, err := idempotency.NewKey("acme", "rerun", value)
		require.NoError(t, err)
		_, err = s.store.Issue(t.Context(), s.pool, key, 24*time.Hour)
		require.NoError(t, err)
	}
	s.abandon(t, "rerun", "used in time", idempotency.TakeoverRerun)
	s.exec(t, `UPDATE idempotency.records SET created_at = created_at - interval '25 h', expires_at = expires_at - interval '25 h' WHERE key = 'late'`)
	report, err := s.open(t).RunOnce(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Purged)
	require.Equal(t, 0, s.count(t, `SELECT count(*) FROM idempotency.records WHERE key = 'late'`))
	require.Equal(t, "INIT", s.state(t, "new"))
	require.Equal(t, "FAILED retryable", s.state(t, "used in time"))
}

func TestPurge_ReplicasAtOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const records = 6000
	s.expired(t, records)
	var group sync.WaitGroup
	var purged atomic.Int64
	for i := range 3 {
		c := s.open(t, func(c *compensator.Config) { c.Batch = 100 * (i + 1) })
		group.Go(func() {
			report, err := c.RunOnce(t.Context())
			if err != nil {
				t.Error(err)
			}
			purged.Add(report.Purged)
		})
	}
	group.Wait()
	require.EqualValues(t, records, purged.Load(), "each is counted once")
}

// A key that begins a new life while the purge is about to take its old one.
func TestPurge_LeavesANewLifeAlone(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.expired(t, 100)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	for i := range 10 {
		var verdict string
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT verdict FROM idempotency.acquire('acme', 'order.create', md5($1::text), idempotency.fingerprint_of('x'))`,
			fmt.Sprint(10*i+1)).Scan(&verdict))
		require.Equal(t, "RUN", verdict)
	}
	report, err := s.open(t, func(c *compensator.Config) { c.Batch, c.Timeout = 7, time.Second }).RunOnce(t.Context())
	require.NoError(t, err, "a row that somebody has holds up nothing for longer than that")
	require.EqualValues(t, 90, report.Purged)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 10, s.count(t, `SELECT count(*) FROM idempotency.records WHERE state = 'PROCESSING'`))
}

// A disk that cannot delete in time what a batch asks for: the batch shrinks until it can, and every pass gets somewhere.
func TestCase_W04_ABatchThatIsTooBig(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const records = 3000
	s.expired(t, records)
	// By rows and not by time: what is done just when its time is over is done, and not counted.
	s.exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN IF (SELECT count(*) FROM gone) > 1000 THEN PERFORM pg_sleep(60); END IF; RETURN NULL; END $$`)
	s.exec(t, `CREATE TRIGGER slow AFTER DELETE ON idempotency.records REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION slow()`)
	c := s.open(t, func(c *compensator.Config) { c.Batch, c.Timeout = records, time.Second })
	report, err := c.RunOnce(t.Context())
	require.NoError(t, err, "what took too long was tried again with less")
	require.EqualValues(t, records, report.Purged)
	require.Zero(t, s.count(t, `SELECT count(*) FROM idempotency.records`))
}

// What was executed without a record goes after its time, unless somebody has to reconcile it.
func TestPurge_ExecutionsWithoutARecord(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `INSERT INTO idempotency.bypasses (tenant, operation, key, attempt_token, fingerprint, enforcement, would_be, outcome, executor,
			began_at, bypassed_at, expires_at, resolution, reconciled_at, reconciled_by, reconcile_reason)
		SELECT 'acme', 'order.create', v.key || '-' || i, decode(lpad(to_hex(i), 32, '0'), 'hex'), idempotency.fingerprint_of('x'), v.enforcement, v.would_be,
			v.outcome, 'h', v.at, v.at, CASE v.key WHEN 'keep forever' THEN NULL WHEN 'keep done' THEN v.at + interval '32 days' ELSE v.at + interval '72 h' END, v.resolution, CASE WHEN v.resolution <> '' THEN v.at END, CASE WHEN v.resolution <> '' THEN 'ada' END,
			CASE WHEN v.resolution <> '' THEN 'x' END
		FROM (VALUES ('old', 'shadow', 'REPLAY', 'SUCCESS', statement_timestamp() - interval '31 days', NULL),
			('reconciled', 'off', 'RUN', 'SUCCESS', statement_timestamp() - interval '31 days', 'DONE'),
			('failed', 'off', 'RUN', 'FAILED', statement_timestamp() - interval '31 days', NULL),
			('keep done', 'off', 'RUN', 'SUCCESS', statement_timestamp() - interval '31 days', 'DONE'),
			('keep forever', 'off', 'RUN', 'SUCCESS', statement_timestamp() - interval '31 days', 'DONE'),
			('rerun', 'off', 'RUN', 'SUCCESS', statement_timestamp() - interval '31 days', 'RERUN'),
			('keep new', 'shadow', 'REPLAY', 'SUCCESS', statement_timestamp() - interval '29 days', NULL),
			('keep open', 'off', 'RUN', 'SUCCESS', statement_timestamp() - interval '31 days', NULL),
			('keep beside', 'shadow', 'IN_PROGRESS', 'SUCCESS', statement_timestamp() - interval '31 days', NULL)) AS v(key, enforcement, would_be, outcome, at, resolution),
			generate_series(1, 50) AS i`)
	dry, err := s.open(t, func(c *compensator.Config) { c.DryRun = true }).RunOnce(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 200, dry.BypassesPurged)
	require.Equal(t, 450, s.count(t, `SELECT count(*) FROM idempotency.bypasses`))
	report, err := s.open(t, func(c *compensator.Config) { c.Batch = 40 }).RunOnce(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 200, report.BypassesPurged)
	require.Equal(t, 250, s.count(t, `SELECT count(*) FROM idempotency.bypasses WHERE key LIKE 'keep %'`))
	require.Equal(t, 250, s.count(t, `SELECT count(*) FROM idempotency.bypasses`))
	_, err = compensator.New(s.pool, &compensator.Config{Operations: s.ops, BypassRetention: time.Minute})
	require.ErrorContains(t, err, "compensator.Config.BypassRetention must be at least 1h")
}
