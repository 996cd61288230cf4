package ids_test

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/ids"
)

// wall is a clock that can be set.
type wall struct {
	mu     sync.Mutex
	offset time.Duration
}

func (w *wall) now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Round(0).Add(w.offset) // Round: without the monotonic reading
}

func (w *wall) set(by time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.offset += by
}

func newGenerator(t testing.TB, worker int, cfg *ids.Config) *ids.Generator {
	t.Helper()
	g, err := ids.NewGenerator(worker, cfg)
	require.NoError(t, err)
	return g
}

// inBubble runs a test at noon, on a clock that moves by sleeping only.
func inBubble(t *testing.T, test func(t *testing.T, w *wall)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(noon.Truncate(time.Millisecond)))
		test(t, &wall{})
	})
}

func TestID_Layout(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, w *wall) {
		t.Helper()
		g := newGenerator(t, 1023, &ids.Config{Clock: w.now})
		for i := range 3 {
			id, err := g.Next()
			require.NoError(t, err)
			require.Positive(t, id)
			require.Equal(t, (noon.UnixMilli()-1735689600000)<<22|1023<<12|int64(i), int64(id))
			require.Equal(t, noon.Truncate(time.Millisecond), id.Time())
			require.Equal(t, 1023, id.Worker())
			require.Equal(t, i, id.Sequence())
		}
	})
	require.Equal(t, "4611686018427387904", ids.ID(1<<62).String())
}

func TestGenerator_WaitsForTheNextMillisecond(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, w *wall) {
		t.Helper()
		g := newGenerator(t, 5, &ids.Config{Clock: w.now})
		began := time.Now()
		all := take(t, g, 3*4096)
		require.Equal(t, 2*time.Millisecond, time.Since(began))
		requireGrowing(t, all)
		require.Equal(t, 4095, all[4095].Sequence())
		require.Equal(t, 0, all[4096].Sequence())
		require.Equal(t, all[0].Time().Add(2*time.Millisecond), all[len(all)-1].Time())
	})
}

func TestGenerator_ClockSetBack(t *testing.T) {
	t.Parallel()
	t.Run("ALittleIsWaitedFor", func(t *testing.T) {
		t.Parallel()
		inBubble(t, func(t *testing.T, w *wall) {
			t.Helper()
			g := newGenerator(t, 5, &ids.Config{Clock: w.now})
			before := take(t, g, 10)
			w.set(-50 * time.Millisecond)
			began := time.Now()
			// More than the rest of the millisecond holds.
			requireGrowing(t, append(before, take(t, g, 5000)...))
			require.Equal(t, 51*time.Millisecond, time.Since(began))
		})
	})
	t.Run("ALotIsAnError", func(t *testing.T) {
		t.Parallel()
		inBubble(t, func(t *testing.T, w *wall) {
			t.Helper()
			g := newGenerator(t, 5, &ids.Config{Clock: w.now})
			before := take(t, g, 10)
			w.set(-time.Hour)
			began := time.Now()
			_, err := g.Next()
			var clock *ids.ClockError
			require.ErrorAs(t, err, &clock)
			require.ErrorIs(t, err, ids.ErrClock)
			require.Equal(t, time.Hour, clock.Behind)
			require.ErrorContains(t, err, "1h0m0s before the last id")
			require.Zero(t, time.Since(began), "at once")
			time.Sleep(time.Hour)
			requireGrowing(t, append(before, take(t, g, 10)...))
		})
	})
	t.Run("NeverWaits", func(t *testing.T) {
		t.Parallel()
		inBubble(t, func(t *testing.T, w *wall) {
			t.Helper()
			g := newGenerator(t, 5, &ids.Config{Clock: w.now, MaxBack: -1})
			before := take(t, g, 10)
			w.set(-time.Millisecond)
			_, err := g.Next()
			require.ErrorIs(t, err, ids.ErrClock)
			w.set(time.Millisecond)
			requireGrowing(t, append(before, take(t, g, 5000)...))
		})
	})
	t.Run("AfterARestart", func(t *testing.T) {
		t.Parallel()
		inBubble(t, func(t *testing.T, w *wall) {
			t.Helper()
			before := take(t, newGenerator(t, 5, &ids.Config{Clock: w.now}), 10)
			w.set(-20 * time.Millisecond)
			next := newGenerator(t, 5, &ids.Config{Clock: w.now, After: before[9]})
			requireGrowing(t, append(before, take(t, next, 10)...))
		})
	})
	t.Run("ItStandsStill", func(t *testing.T) {
		t.Parallel()
		inBubble(t, func(t *testing.T, _ *wall) {
			t.Helper()
			g := newGenerator(t, 5, &ids.Config{Clock: func() time.Time { return noon }})
			take(t, g, 4096)
			_, err := g.Next()
			require.ErrorIs(t, err, ids.ErrClock)
		})
	})
	t.Run("BeforeTheEpochOrBehindTheEnd", func(t *testing.T) {
		t.Parallel()
		for _, at := range []time.Time{{}, time.UnixMilli(ids.Epoch - 1), time.UnixMilli(ids.Epoch + 1<<41)} {
			_, err := newGenerator(t, 5, &ids.Config{Clock: func() time.Time { return at }}).Next()
			require.ErrorIs(t, err, ids.ErrClock)
		}
		for _, at := range []time.Time{time.UnixMilli(ids.Epoch), time.UnixMilli(ids.Epoch + 1<<41 - 1)} {
			id, err := newGenerator(t, 5, &ids.Config{Clock: func() time.Time { return at }}).Next()
			require.NoError(t, err)
			require.Equal(t, at.UTC(), id.Time())
			require.Positive(t, id)
		}
	})
}

// Many small steps back and forth, as of a clock that is being corrected, while several callers ask.
func TestGenerator_RestlessClock(t *testing.T) {
	t.Parallel()
	w := &wall{}
	g := newGenerator(t, 5, &ids.Config{Clock: w.now})
	stop := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				w.set([]time.Duration{-7 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond}[i%3])
			}
		}
	})
	var callers sync.WaitGroup
	made := make([][]ids.ID, 4)
	for i := range made {
		callers.Go(func() { made[i] = take(t, g, 100_000) })
	}
	callers.Wait()
	close(stop)
	clock.Wait()
	for _, one := range made {
		requireGrowing(t, one)
	}
	requireUnique(t, slices.Concat(made...))
}

func TestNewGenerator_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		worker int
		config *ids.Config
		field  string
	}{
		{-1, nil, "worker"},
		{1024, nil, "worker"},
		{0, &ids.Config{MaxBack: -2}, "Config.MaxBack"},
		{0, &ids.Config{MaxBack: time.Hour}, "Config.MaxBack"},
		{0, &ids.Config{After: -1}, "Config.After"},
	} {
		_, err := ids.NewGenerator(c.worker, c.config)
		var wrong *idempotency.ConfigError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, c.field, wrong.Field)
	}
}

type nexter interface{ Next() (ids.ID, error) }

func take(t testing.TB, g nexter, n int) []ids.ID {
	t.Helper()
	all := make([]ids.ID, n)
	for i := range all {
		var err error
		if all[i], err = g.Next(); err != nil {
			t.Errorf("id %d of %d: %v", i, n, err)
			return all[:i]
		}
	}
	return all
}

func requireGrowing(t testing.TB, all []ids.ID) {
	t.Helper()
	for i := 1; i < len(all); i++ {
		if all[i] <= all[i-1] {
			t.Fatalf("id %d is %v, the one before it %v", i, all[i], all[i-1])
		}
	}
}

func requireUnique(t testing.TB, all []ids.ID) {
	t.Helper()
	slices.Sort(all)
	requireGrowing(t, all)
}

func BenchmarkGenerator(b *testing.B) {
	b.Run("OneCaller", func(b *testing.B) {
		g := newGenerator(b, 1, nil)
		for b.Loop() {
			if _, err := g.Next(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("ManyCallers", func(b *testing.B) {
		g := newGenerator(b, 1, nil)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if _, err := g.Next(); err != nil {
					b.Error(err)
				}
			}
		})
	})
	// A clock that never ends a millisecond too early: what the code itself costs.
	b.Run("WithoutTheWait", func(b *testing.B) {
		now := noon
		g := newGenerator(b, 1, &ids.Config{Clock: func() time.Time { now = now.Add(time.Microsecond); return now }})
		for b.Loop() {
			if _, err := g.Next(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkOrderID(b *testing.B) {
	for b.Loop() {
		ids.OrderID("customer-4711", "sku-0815", noon)
	}
}
