package main

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// playStorm plays one against a shop of its own.
func playStorm(t *testing.T, unsafe bool, o stormOptions) *report {
	t.Helper()
	s := newShop(t, unsafe, stormThink)
	r, err := newStorm(s.pool, s.instances, o).run(t.Context())
	require.NoError(t, err)
	requireAddsUp(t, r)
	require.EqualValues(t, r.Orders, s.number(t, `SELECT count(*) FROM demo.orders`))
	sold := s.number(t, `SELECT sum(quantity) FROM demo.orders`)
	require.Equal(t, sold, s.number(t, `SELECT sum(1000000000 - quantity) FROM demo.stock WHERE sku LIKE 'bean-%'`))
	return r
}

func requireAddsUp(t *testing.T, r *report) {
	t.Helper()
	require.Equal(t, r.Requests, r.Executed+r.Replayed+r.InProgress+r.Disconnected+r.Errors)
	require.Equal(t, r.Replayed, r.ByLocal+r.ByRedis+r.ByPostgreSQL)
	require.LessOrEqual(t, r.Merged, r.ByLocal)
	require.Positive(t, r.Statements)
}

func TestStorm_FrontsGiveMostReplays(t *testing.T) {
	t.Parallel()
	server, _ := startRedis(t)
	s := openShop(t, shopOptions{instances: 3, redis: server, think: noThinking})
	s.warmUp(t)
	r, err := newStorm(s.pool, s.instances, stormOptions{users: 10, keys: 40, requests: 400}).run(t.Context())
	require.NoError(t, err)
	requireAddsUp(t, r)
	require.True(t, r.good(), "%+v", r)
	require.EqualValues(t, 40, r.Orders)
	require.Positive(t, r.ByLocal)
	require.Positive(t, r.ByRedis)
	require.Greater(t, r.ByLocal+r.ByRedis, r.ByPostgreSQL)
}

func TestStorm_EveryKeyGetsOneOrder(t *testing.T) {
	t.Parallel()
	r := playStorm(t, false, stormOptions{users: 40, keys: 20, requests: 200})
	require.EqualValues(t, 200, r.Requests)
	require.EqualValues(t, 20, r.keys)
	require.EqualValues(t, 20, r.Orders)
	require.Zero(t, r.Duplicates)
	require.Zero(t, r.Lost)
	require.Zero(t, r.Errors, r.firstError)
	require.Zero(t, r.unsettled)
	require.Positive(t, r.Executed)
	require.Positive(t, r.Replayed)
	require.Positive(t, r.Disconnected)
	require.True(t, r.good())
}

func TestStorm_WithoutTheLibraryThereAreDuplicates(t *testing.T) {
	t.Parallel()
	r := playStorm(t, true, stormOptions{users: 20, keys: 6, requests: 60})
	require.EqualValues(t, 60, r.Requests)
	require.Positive(t, r.Duplicates)
	require.Greater(t, r.Orders, r.keys)
	require.Zero(t, r.Lost)
	require.False(t, r.good())
}

func TestStorm_OddSizesAddUpToo(t *testing.T) {
	t.Parallel()
	for _, o := range []stormOptions{
		{users: 1, keys: 1, requests: 1},
		{users: 1, keys: 3, requests: 11},
		{users: 7, keys: 5, requests: 5},
		{users: 50, keys: 2, requests: 61},
	} {
		r := playStorm(t, false, o)
		require.EqualValues(t, o.requests, r.Requests)
		require.EqualValues(t, o.keys, r.Orders)
		require.True(t, r.good(), "%+v: %+v", o, r)
	}
}

func TestStorm_WithADurationGoesOnWithFreshKeys(t *testing.T) {
	t.Parallel()
	for o := (stormOptions{users: 20, keys: 2, requests: 10, duration: 4 * time.Second}); ; o.duration *= 2 {
		r := playStorm(t, false, o)
		require.Equal(t, r.keys, r.Orders)
		require.True(t, r.good(), "%+v", r)
		if r.keys > int64(o.keys) {
			return
		}
		require.Less(t, o.duration, time.Minute, "even a slow machine has played the first round by then")
	}
}

func TestStorm_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, stormThink)
	storm := newStorm(s.pool, s.instances, stormOptions{users: 10, keys: 1000, requests: 10_000})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := storm.run(ctx)
		done <- err
	}()
	s.eventually(t, 1, `SELECT least(count(*), 1) FROM demo.orders`)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	s.close()
}

// The judge must find what the storm never shows.
func TestCheck_FindsDuplicatesAndLies(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	rows, err := s.pool.Query(t.Context(), `
		INSERT INTO demo.orders (idempotency_key, customer, sku, quantity)
		SELECT key, 'c-7', 'tea', 1 FROM unnest(ARRAY['good', 'twice', 'twice', 'hidden', 'other']) key RETURNING id`)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	storm := newStorm(s.pool, s.instances, stormOptions{users: 1, keys: 1, requests: 1})

	r := &report{}
	require.NoError(t, storm.check(t.Context(), []told{
		{key: "good", outcome: executed, order: ids[0], took: time.Millisecond},
		{key: "good", outcome: replayed, order: ids[0], took: time.Millisecond},
		{key: "twice", outcome: executed, order: ids[1], took: time.Millisecond},
		{key: "twice", outcome: disconnected},
		{key: "hidden", outcome: failed, refused: true, detail: "no", took: time.Millisecond}, // lost: there is an order
		{key: "gone", outcome: executed, order: 1 << 40, took: time.Millisecond},              // lost: there is none
		{key: "wrong", outcome: replayed, order: ids[4], took: time.Millisecond},              // lost: it is another key's
		{key: "open", outcome: inProgress, took: time.Millisecond},
		{key: "refused", outcome: failed, refused: true, took: time.Millisecond},
	}, r))
	require.Equal(t, [6]int64{9, 3, 2, 1, 1, 2}, [6]int64{r.Requests, r.Executed, r.Replayed, r.InProgress, r.Disconnected, r.Errors})
	require.EqualValues(t, 7, r.keys)
	require.EqualValues(t, 4, r.Orders)
	require.EqualValues(t, 1, r.Duplicates)
	require.EqualValues(t, 3, r.Lost)
	require.EqualValues(t, 1, r.unsettled)
	require.Equal(t, "no", r.firstError)
	require.False(t, r.good())
}

func TestPlan_MakesExactlyItsRequestsAndAlwaysTheSame(t *testing.T) {
	t.Parallel()
	for number := range 50 {
		for n := 1; n <= 40; n++ {
			crowd, last := plan(number, n)
			total := last
			for _, v := range crowd {
				total += len(v)
			}
			require.Equal(t, n, total)
			require.Positive(t, last)
			again, _ := plan(number, n)
			require.Equal(t, crowd, again)
		}
	}
}

func TestReport_ColumnsAreAligned(t *testing.T) {
	t.Parallel()
	r := &report{
		Requests: 1_234_567, Executed: 1_000_000, Replayed: 200_000, InProgress: 30_000, Disconnected: 4_567,
		Orders: 1_000_000, keys: 1_000_000, P50: 1.25, P99: 1234.5,
		ByLocal: 120_000, ByRedis: 50_000, ByPostgreSQL: 30_000, Merged: 1_000,
	}
	r.setStatements(2_345_678)
	var out bytes.Buffer
	r.print(&out, 1234*time.Millisecond)
	require.Equal(t, `What the clients were told:
  requests = executed + replayed + in progress + disconnected + errors
 1,234,567  1,000,000    200,000        30,000          4,567        0

Who gave the replays, and what all of it cost:
  replayed = by local + by Redis + by PostgreSQL     statements   per request
   200,000    120,000     50,000          30,000      2,345,678          1.90

What the database says:
      keys     orders   duplicates   lost        p50        p99
 1,000,000  1,000,000            0      0     1.2 ms  1234.5 ms
`, out.String()[:bytes.Index(out.Bytes(), []byte("\n\n  by local:"))+1])
	out.Reset()
	require.NoError(t, r.printJSON(&out))
	require.Equal(t, `{"requests":1234567,"executed":1000000,"replayed":200000,"in_progress":30000,"disconnected":4567,"errors":0,`+
		`"orders":1000000,"duplicates":0,"lost":0,"p50_ms":1.25,"p99_ms":1234.5,"replayed_by_local":120000,"replayed_by_redis":50000,`+
		`"replayed_by_postgresql":30000,"replayed_merged":1000,"statements":2345678,"statements_per_request":1.9}`+"\n", out.String())
}

func TestHistogram_QuantilesAreExactToThreePercent(t *testing.T) {
	t.Parallel()
	var h histogram
	require.Zero(t, h.quantile(0.5))
	for ms := 1; ms <= 1000; ms++ {
		h.add(time.Duration(ms) * time.Millisecond)
	}
	require.InEpsilon(t, 500, h.quantile(0.50), 0.03)
	require.InEpsilon(t, 990, h.quantile(0.99), 0.03)
	h.add(0)
	h.add(24 * time.Hour)
}
