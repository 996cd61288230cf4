package frontsuite

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
)

// planted is how many of each kind of drift there are.
const planted = 100

// healer is a compensator of this shop's front.
func (s *shop) healer(t *testing.T, change ...func(*compensator.Config)) *compensator.Compensator {
	t.Helper()
	cfg := &compensator.Config{Operations: idempotencytest.Operations(), Fronts: []idempotency.Auditable{s.redis}, Timeout: time.Minute}
	for _, f := range change {
		f(cfg)
	}
	c, err := compensator.New(s.pool, cfg)
	require.NoError(t, err)
	return c
}

func dry(c *compensator.Config) { c.DryRun = true }

// placeMany places orders named like this, and returns what was asked and recorded.
func (s *shop) placeMany(t *testing.T, name string) (reqs []idempotency.Request, records []idempotency.Record) {
	t.Helper()
	for i := range planted {
		req := request(t, idempotencytest.Orders, fmt.Sprintf("%s-%03d", name, i))
		reqs = append(reqs, req)
		records = append(records, s.place(t, req, "first "+req.Key.Value()).Record)
	}
	// On a busy machine the epoch is unknown for a moment, and what is committed then is not published.
	var epoch string
	var now time.Time
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT idempotency.current_epoch(), statement_timestamp()`).Scan(&epoch, &now))
	for _, r := range records {
		s.redis.Publish(t.Context(), idempotency.Entry{Record: r, Epoch: epoch, Life: r.Life(now)})
	}
	require.NoError(t, s.redis.Flush(t.Context()))
	return reqs, records
}

// contents are all rows that healing might touch.
func contents(t *testing.T, pool *pgxpool.Pool) (digest string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT concat(
		(SELECT md5(string_agg(r::text, ',' ORDER BY key, tenant, operation)) FROM idempotency.records AS r),
		(SELECT md5(string_agg(a::text, ',' ORDER BY id)) FROM idempotency.attempts AS a),
		(SELECT md5(string_agg(o::text, ',' ORDER BY id)) FROM suite_orders AS o), idempotency.current_epoch())`).Scan(&digest))
	return digest
}

// Every kind of difference, a hundred times each: one pass ends them all, PostgreSQL stays as it is, and every later caller
// gets what PostgreSQL says.
func TestHeal_EveryKindOfDriftInOnePass(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	ctx := t.Context()
	replaced := map[string]string{} // by key: what Redis would say, wrongly
	names := func(reqs []idempotency.Request) (all []string) {
		keys := make([]idempotency.Key, len(reqs))
		for i, req := range reqs {
			keys[i] = req.Key
		}
		kept, err := s.redis.Inspect(ctx, keys)
		require.NoError(t, err)
		for _, k := range kept {
			require.NotEmpty(t, k.Name)
			all = append(all, k.Name)
		}
		return all
	}
	publish := func(r idempotency.Record, epoch string) {
		require.NoError(t, s.redis.Evict(ctx, r.Key))
		s.redis.Publish(ctx, idempotency.Entry{Record: r, Epoch: epoch, Life: time.Hour})
	}

	// Before the last restore: half of the records are still there.
	oldReqs, _ := s.placeMany(t, "of-before")
	for i, req := range oldReqs {
		if i%2 == 0 {
			forget(t, b.pool, req.Key.Value())
		}
	}
	var epoch string
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT idempotency.begin_epoch('restored from a backup')`).Scan(&epoch))
	s.awaitNewEpoch(t, epoch)
	awaited, err := idempotencytest.Orders.Key("await", t.Name()) // by newShop
	require.NoError(t, err)
	require.NoError(t, s.redis.Evict(ctx, awaited))
	forget(t, b.pool, awaited.Value())

	missing, _ := s.placeMany(t, "missing")
	require.NoError(t, b.admin.Del(ctx, names(missing)...).Err())
	age := func(like, by string) {
		t.Helper()
		_, err := b.pool.Exec(ctx, `UPDATE idempotency.records SET completed_at = completed_at - $2::text::interval,
			created_at = created_at - $2::text::interval, acquired_at = acquired_at - $2::text::interval,
			expires_at = expires_at - $2::text::interval WHERE key LIKE $1`, like, by)
		require.NoError(t, err)
	}
	age("missing-%", "1 minute") // an outcome may take a moment to get to the front

	rolledBack, _ := s.placeMany(t, "rolled-back")
	for _, req := range rolledBack {
		forget(t, b.pool, req.Key.Value())
	}

	_, wrong := s.placeMany(t, "wrong")
	for i, r := range wrong {
		switch i % 5 {
		case 0:
			r.Fence++
		case 1:
			r.Fingerprint = idempotency.FingerprintBytes([]byte("another payload"))
		case 2:
			r.AttemptToken = idempotency.NewAttemptToken()
		case 3:
			r.Result = []byte("forged")
			replaced[r.Key.Value()] = "forged"
		case 4:
			r.Fence, r.Generation = r.Fence+1_000_000, r.Generation+1_000_000
		}
		publish(r, epoch)
	}
	require.NoError(t, s.redis.Flush(ctx))

	endless, _ := s.placeMany(t, "endless")
	for _, name := range names(endless) {
		require.NoError(t, b.admin.Persist(ctx, name).Err())
	}

	for i := range planted {
		req := request(t, idempotencytest.Orders, fmt.Sprint("mark-", i))
		ask := idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint, Epoch: epoch}
		_, found, err := s.redis.Begin(ctx, ask, idempotency.NewAttemptToken(), time.Hour)
		require.NoError(t, err)
		require.False(t, found)
	}
	marks, err := b.admin.Keys(ctx, "*:mark").Result()
	require.NoError(t, err)
	require.Len(t, marks, planted)
	for _, name := range marks[:planted/2] {
		require.NoError(t, b.admin.Persist(ctx, name).Err())
	}

	unreadable, _ := s.placeMany(t, "unreadable")
	for i, name := range names(unreadable) {
		if i%2 == 0 { // every call about this key is an error of Redis
			require.NoError(t, b.admin.Del(ctx, name).Err())
			require.NoError(t, b.admin.LPush(ctx, name, "x").Err())
		} else {
			require.NoError(t, b.admin.HSet(ctx, name, "body", "x").Err())
			require.NoError(t, b.admin.Persist(ctx, name).Err())
		}
	}
	age("unreadable-%", "1 day") // else those that are removed are found missing, as soon as they are old enough

	before := contents(t, b.pool)
	expected := func(r compensator.Report) {
		t.Helper()
		require.Equal(t, map[string]int{
			"missing": planted, "no record": planted, "other epoch": planted, "wrong": planted, "endless": planted,
			"no owner": planted, "unreadable": planted,
		}, map[string]int{
			"missing": r.Missing, "no record": r.NoRecord, "other epoch": r.OtherEpoch, "wrong": r.Wrong, "endless": r.Endless,
			"no owner": r.NoOwner, "unreadable": r.Unreadable,
		})
		require.Equal(t, 7*planted, r.Drifted())
	}
	reported, err := s.healer(t, dry).RunOnce(ctx)
	require.NoError(t, err)
	expected(reported)
	require.Zero(t, reported.Discarded+reported.Published, "a dry run changes nothing")

	told := map[compensator.DriftKind]int{}
	healer := s.healer(t, func(c *compensator.Config) {
		c.OnDrift = func(_ context.Context, d compensator.Drift) {
			require.True(t, d.Healed)
			require.Equal(t, "redis", d.Front)
			told[d.Kind]++
		}
	})
	report, err := healer.RunOnce(ctx)
	require.NoError(t, err)
	expected(report)
	require.Len(t, told, 7)
	t.Logf("healed %d in %v: examined %d, discarded %d, published %d", report.Drifted(), report.Duration, report.Examined, report.Discarded, report.Published)
	require.Equal(t, before, contents(t, b.pool), "PostgreSQL is never changed to match Redis")

	again, err := s.healer(t, dry).RunOnce(ctx)
	require.NoError(t, err)
	require.Zero(t, again.Drifted())
	marks, err = b.admin.Keys(ctx, "*:mark").Result()
	require.NoError(t, err)
	require.Empty(t, marks)

	rows, err := b.pool.Query(ctx, `SELECT key, convert_from(result, 'UTF8') FROM idempotency.records WHERE tenant = $1`, idempotency.SingleTenant)
	require.NoError(t, err)
	stored := map[string]string{}
	var key, result string
	_, err = pgx.ForEachRow(rows, []any{&key, &result}, func() error {
		stored[key] = result
		return nil
	})
	require.NoError(t, err)
	all, err := b.admin.Keys(ctx, "*:entry").Result()
	require.NoError(t, err)
	fromRedis := s.events.redis.Load()
	// The second half of what is of before the restore, and what is missing or replaced: all from Redis again.
	for _, name := range []string{"of-before", "missing", "wrong", "endless"} {
		for i := range planted {
			req := request(t, idempotencytest.Orders, fmt.Sprintf("%s-%03d", name, i))
			req.Retry = true // a runner that had no duplicates for a while asks PostgreSQL first
			if want, there := stored[req.Key.Value()]; there {
				a := s.place(t, req, "again")
				require.True(t, a.Replayed)
				require.Equal(t, want, string(a.Result))
				require.NotEqual(t, replaced[req.Key.Value()], string(a.Result))
			}
		}
	}
	require.GreaterOrEqual(t, s.events.redis.Load()-fromRedis, int64(3*planted+planted/2))
	require.GreaterOrEqual(t, len(all), 3*planted+planted/2)
	for _, name := range all {
		left, err := b.admin.PTTL(ctx, name).Result()
		require.NoError(t, err)
		require.Positive(t, left, "nothing stays for ever")
	}
	// What PostgreSQL does not know runs.
	for _, req := range rolledBack {
		require.False(t, s.place(t, req, "again").Replayed)
		require.Equal(t, 1, orders(t, b.pool, req.Key.Value()))
	}
}

// awaitNewEpoch returns when outcomes are published under it.
func (s *shop) awaitNewEpoch(t *testing.T, epoch string) {
	t.Helper()
	require.Eventually(t, func() bool {
		req := request(t, idempotencytest.Orders, fmt.Sprint("epoch-", time.Now().UnixNano()))
		s.place(t, req, "")
		require.NoError(t, s.redis.Flush(t.Context()))
		kept, err := s.redis.Inspect(t.Context(), []idempotency.Key{req.Key})
		require.NoError(t, err)
		if kept[0].Epoch != epoch {
			require.NoError(t, s.redis.Evict(t.Context(), req.Key))
			forget(t, s.pool, req.Key.Value())
		}
		return kept[0].Epoch == epoch
	}, 10*time.Second, 20*time.Millisecond)
}

// Who runs a key keeps its mark, in both modes; its outcome comes, and is left alone.
func TestHeal_LeavesAloneWhatIsRight(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	s.placeMany(t, "done")
	inside, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	req := request(t, idempotencytest.Orders, "running")
	go func() {
		_, err := s.call(context.WithoutCancel(t.Context()), req, func(context.Context, pgx.Tx) ([]byte, error) {
			close(inside)
			<-leave
			return []byte("done"), nil
		})
		done <- err
	}()
	<-inside
	// The mark of a leased one, whose transaction has long ended.
	leased := request(t, idempotencytest.Impatient, "leased")
	store := idempotency.NewStore(pgx.QueryExecModeCacheStatement)
	acquired, err := store.AcquireLease(t.Context(), b.pool, &idempotency.LeaseRequest{
		Request: leased, AttemptToken: idempotency.NewAttemptToken(), Lease: time.Minute, Takeover: idempotency.TakeoverRerun,
	})
	require.NoError(t, err)
	require.Equal(t, idempotency.VerdictRun, acquired.Verdict)
	_, _, err = s.redis.Begin(t.Context(), idempotency.Ask{Key: leased.Key, Fingerprint: leased.Fingerprint, Epoch: "x"}, idempotency.NewAttemptToken(), time.Minute)
	require.NoError(t, err)

	for range 3 {
		report, err := s.healer(t).RunOnce(t.Context())
		require.NoError(t, err)
		require.Zero(t, report.Drifted())
		require.Zero(t, report.Discarded+report.Published)
		require.GreaterOrEqual(t, report.Examined, planted+2)
	}
	marks, err := b.admin.Keys(t.Context(), "*:mark").Result()
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(marks), 1)
	close(leave)
	require.NoError(t, <-done)
}

// What others keep under our prefix is not touched: outcomes of Do, states of a Machine, other operations.
func TestHeal_OnlyItsOwnOperations(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	s.placeMany(t, "other")
	for _, req := range []idempotency.Request{request(t, idempotencytest.Orders, "other-000"), request(t, idempotencytest.Orders, "other-001")} {
		forget(t, b.pool, req.Key.Value())
	}
	for _, name := range []string{"pgonce:", "pgonce:x:entry", "pgonce:00000000:{}:entry", "pgonce:00000000:{" + strings.Repeat("!", 22) + "}:mark"} {
		require.NoError(t, b.admin.Set(t.Context(), name, "x", 0).Err())
	}
	c, err := compensator.New(b.pool, &compensator.Config{
		Operations: []idempotency.Operation{{Name: "another"}}, Fronts: []idempotency.Auditable{s.redis},
	})
	require.NoError(t, err)
	report, err := c.RunOnce(t.Context())
	require.NoError(t, err)
	require.Zero(t, report.Drifted())
	require.Zero(t, report.Examined)
	report, err = s.healer(t).RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, report.NoRecord)
	require.Equal(t, 2, report.Drifted())
}

// A front larger than one pass may look at is gone through in several, and a Redis that is away costs its own part only.
func TestHeal_InParts(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	for i := range 20 {
		reqs, _ := s.placeMany(t, fmt.Sprint("part", i))
		for _, req := range reqs {
			forget(t, b.pool, req.Key.Value())
		}
	}
	c := s.healer(t, func(c *compensator.Config) { c.HealLimit = 1 })
	passes, found := 0, 0
	for ; found < 20*planted && passes < 100; passes++ {
		report, err := c.RunOnce(t.Context())
		require.NoError(t, err)
		found += report.NoRecord
	}
	require.Equal(t, 20*planted, found)
	require.Greater(t, passes, 1)

	gone := newShop(t, fronts{redis: true}, "127.0.0.1:1", "", b.pool)
	report, err := gone.healer(t).RunOnce(t.Context())
	require.ErrorContains(t, err, "heal front redis")
	require.NotEmpty(t, report.Epoch)
}
