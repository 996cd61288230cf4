package redisfront_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

func orderMachine(t testing.TB) *idempotency.Machine {
	t.Helper()
	m, err := idempotency.NewMachine("order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"}, []string{"paid", "refunded"})
	require.NoError(t, err)
	return m
}

func newStates(t *testing.T, f *redisfront.Front, m *idempotency.Machine) *redisfront.CacheStates {
	t.Helper()
	s, err := f.CacheStates(m, time.Minute)
	require.NoError(t, err)
	return s
}

func newMirror(t *testing.T, f *redisfront.Front, m *idempotency.Machine) *redisfront.Mirror {
	t.Helper()
	mirror, err := f.Mirror(m, time.Minute)
	require.NoError(t, err)
	return mirror
}

// newRow returns the key of a row that no other test uses.
func newRow(t testing.TB, m *idempotency.Machine) idempotency.Key {
	t.Helper()
	row, err := m.Key(idempotency.SingleTenant, "row-"+rand.Text())
	require.NoError(t, err)
	return row
}

// answer is an answer as a text to compare.
func answer(moved idempotency.Moved, err error) string {
	var refused *idempotency.TransitionError
	switch {
	case errors.As(err, &refused):
		return "refused from " + refused.From + ", allowed " + strings.Join(refused.Allowed, " ")
	case errors.Is(err, idempotency.ErrNotFound):
		return "not found"
	case errors.Is(err, idempotency.ErrMismatch):
		return "mismatch"
	case err != nil:
		return err.Error()
	case moved.Already:
		return "already"
	}
	return "moved from " + moved.From
}

func TestCacheStates_EachIDHasOneAnswer(t *testing.T) {
	t.Parallel()
	ctx, m := t.Context(), orderMachine(t)
	s, row := newStates(t, newFront(t), m), newRow(t, m)
	for _, step := range []struct{ id, to, want string }{
		{"1", "paid", "not found"},
		{"1", "created", "moved from "}, // the id is not used up by what found nothing
		{"2", "created", "already"},
		{"3", "shipped", "refused from created, allowed paid"},
		{"4", "paid", "moved from created"},
		{"5", "shipped", "moved from paid"},
		// All of them again, when the state is another one.
		{"1", "created", "moved from "},
		{"2", "created", "already"},
		{"3", "shipped", "refused from created, allowed paid"},
		{"4", "paid", "moved from created"},
		{"5", "shipped", "moved from paid"},
		{"5", "delivered", "mismatch"},
		{"6", "shipped", "already"}, // nothing of the above has changed it
		{"7", "refunded", "refused from shipped, allowed delivered"},
		{"8", "delivered", "moved from shipped"},
		{"9", "created", "refused from delivered, allowed "},
	} {
		for range 2 {
			require.Equal(t, step.want, answer(s.Move(ctx, row, step.id, step.to)), "%+v", step)
			if step.want == "not found" {
				break
			}
		}
	}
	other := newRow(t, m)
	require.Equal(t, "moved from ", answer(s.Move(ctx, other, "4", "created")), "an id is its row's")
}

func TestCacheStates_OfHundredCallersOneMoves(t *testing.T) {
	t.Parallel()
	m, f := orderMachine(t), newFront(t)
	s := newStates(t, f, m)
	storm := func(row idempotency.Key, id func(i int) string) map[string]int {
		_, err := s.Move(t.Context(), row, "begin", "created")
		require.NoError(t, err)
		answers := make([]string, 100)
		var group sync.WaitGroup
		for i := range answers {
			group.Go(func() { answers[i] = answer(s.Move(t.Context(), row, id(i), "paid")) })
		}
		group.Wait()
		count := map[string]int{}
		for _, a := range answers {
			count[a]++
		}
		return count
	}
	require.Equal(t, map[string]int{"moved from created": 1, "already": 99}, storm(newRow(t, m), func(i int) string { return fmt.Sprint(i) }))
	require.Equal(t, map[string]int{"moved from created": 100}, storm(newRow(t, m), func(int) string { return "one" }), "one transition, sent a hundred times")
}

func TestCacheStates_RefusesWrongArguments(t *testing.T) {
	t.Parallel()
	ctx, m, f := t.Context(), orderMachine(t), newFront(t)
	s, row := newStates(t, f, m), newRow(t, m)
	for _, id := range []string{"", " ", "a\x00", "\xff", strings.Repeat("i", 256)} {
		_, err := s.Move(ctx, row, id, "created")
		require.ErrorIs(t, err, idempotency.ErrInvalid)
		require.ErrorContains(t, err, "transition id")
	}
	_, err := s.Move(ctx, row, "1", "nowhere")
	require.ErrorIs(t, err, idempotency.ErrInvalid)
	_, err = s.Move(ctx, newKey(t), "1", "created")
	require.ErrorIs(t, err, idempotency.ErrConfig)
	mirror := newMirror(t, f, m)
	require.ErrorIs(t, mirror.Set(ctx, row, "nowhere", "one"), idempotency.ErrInvalid)
	require.ErrorIs(t, mirror.Refuses(ctx, row, "nowhere", "one"), idempotency.ErrInvalid)
	require.ErrorIs(t, mirror.Set(ctx, newKey(t), "paid", "one"), idempotency.ErrConfig)
	require.ErrorIs(t, mirror.Refuses(ctx, newKey(t), "paid", "one"), idempotency.ErrConfig)
	require.ErrorIs(t, mirror.Forget(ctx, newKey(t)), idempotency.ErrConfig)
}

func TestMirror_RefusesOnlyWhatIsCertain(t *testing.T) {
	t.Parallel()
	ctx, m, f := t.Context(), orderMachine(t), newFront(t)
	mirror, row := newMirror(t, f, m), newRow(t, m)
	set := func(state, epoch string) {
		t.Helper()
		require.NoError(t, mirror.Set(ctx, row, state, epoch))
		require.NoError(t, f.Flush(ctx))
	}
	refused := func(epoch string) (all []string) {
		t.Helper()
		for _, to := range m.States() {
			if err := mirror.Refuses(ctx, row, to, epoch); err != nil {
				require.ErrorIs(t, err, idempotency.ErrTransition)
				all = append(all, to)
			}
		}
		return all
	}
	require.Empty(t, refused("one"), "nothing is known")
	set("created", "one")
	require.Empty(t, refused("one"), "a later state may follow that the copy has not seen")
	set("shipped", "one")
	require.Equal(t, []string{"created", "paid", "refunded"}, refused("one"))
	require.Empty(t, refused("two"), "a copy of another epoch is not believed")
	require.Empty(t, refused(""), "nor one of none")
	set("paid", "one")
	require.Equal(t, []string{"created", "paid", "refunded"}, refused("one"), "an older state that comes late")
	set("delivered", "")
	require.Equal(t, []string{"created", "paid", "refunded"}, refused("one"), "no epoch, no copy")
	set("paid", "two")
	require.Equal(t, []string{"created"}, refused("two"), "another epoch's copy is overwritten")
	require.NoError(t, mirror.Forget(ctx, row))
	require.Empty(t, refused("two"))

	// A later release has more states; this one is certain of nothing about them.
	later, err := idempotency.NewMachine("order", []string{"created"}, []string{"created", "lost"})
	require.NoError(t, err)
	require.NoError(t, newMirror(t, f, later).Set(ctx, row, "lost", "two"))
	require.NoError(t, f.Flush(ctx))
	require.Empty(t, refused("two"))

	// The mirror is no authority, and CacheStates is no mirror.
	_, err = newStates(t, f, m).Move(ctx, row, "1", "shipped")
	require.ErrorIs(t, err, idempotency.ErrNotFound)
}

func TestMirror_AFailingRedisRefusesNothing(t *testing.T) {
	t.Parallel()
	ctx, m, row := t.Context(), orderMachine(t), newRow(t, orderMachine(t))
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	events := newEvents()
	f, err := redisfront.New(client, &redisfront.Config{OnEvent: events.add})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	mirror := newMirror(t, f, m)
	require.NoError(t, mirror.Refuses(ctx, row, "created", "one"))
	require.NoError(t, mirror.Set(ctx, row, "paid", "one"))
	require.Error(t, mirror.Forget(ctx, row))
	require.Positive(t, count[idempotency.FrontFailed](events))

	_, err = newStates(t, f, m).Move(ctx, row, "1", "created")
	var e *redisfront.Error
	require.ErrorAs(t, err, &e, "there Redis is the authority, and its failure is the call's")
}

// What somebody else put under our names is never taken for a state.
func TestMachine_ForeignValues(t *testing.T) {
	t.Parallel()
	ctx, m, client := t.Context(), orderMachine(t), newClient(t)
	for name, spoil := range map[string]func(name string) error{
		"another type": func(name string) error {
			return errors.Join(client.Del(ctx, name).Err(), client.Set(ctx, name, "x", time.Minute).Err())
		},
		"no state":      func(name string) error { return client.HDel(ctx, name, "state").Err() },
		"unknown state": func(name string) error { return client.HSet(ctx, name, "state", "bogus").Err() },
	} {
		prefix := fmt.Sprintf("foreign-%d:", keys.Add(1))
		f := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
		s, mirror, row := newStates(t, f, m), newMirror(t, f, m), newRow(t, m)
		_, err := s.Move(ctx, row, "1", "created")
		require.NoError(t, err)
		require.NoError(t, mirror.Set(ctx, row, "delivered", "one"))
		require.NoError(t, f.Flush(ctx))
		for _, kind := range []string{":state", ":mirror"} {
			names, err := client.Keys(ctx, prefix+"*"+kind).Result()
			require.NoError(t, err)
			require.Len(t, names, 1)
			require.NoError(t, spoil(names[0]), name)
		}
		_, err = s.Move(ctx, row, "2", "paid")
		require.Error(t, err, name)
		require.NoError(t, mirror.Refuses(ctx, row, "created", "one"), name)
	}
}

// drawMachine makes a machine of up to six states, with a start or two.
func drawMachine(t *rapid.T) *idempotency.Machine {
	names := []string{"created", "paid", "a{b}", "'; DROP", "NULL", "1.10"}
	n := rapid.IntRange(2, len(names)).Draw(t, "states")
	edges := map[idempotency.Transition]bool{}
	for i := 1; i < n; i++ { // so that each can be reached
		edges[idempotency.Transition{From: names[rapid.IntRange(0, i-1).Draw(t, "parent")], To: names[i]}] = true
	}
	for range rapid.IntRange(0, 8).Draw(t, "more") {
		from, to := rapid.IntRange(0, n-1).Draw(t, "from"), rapid.IntRange(0, n-1).Draw(t, "to")
		if from != to {
			edges[idempotency.Transition{From: names[from], To: names[to]}] = true
		}
	}
	var paths [][]string
	for e := range edges {
		paths = append(paths, []string{e.From, e.To})
	}
	slices.SortFunc(paths, slices.Compare) // a map's order would be another machine each time
	starts := names[:1]
	if rapid.Bool().Draw(t, "second start") {
		starts = []string{names[0], names[n-1]}
	}
	m, err := idempotency.NewMachine("random", starts, paths...)
	require.NoError(t, err)
	return m
}

// The declaration, the guard in PostgreSQL and the script in Redis say the same of every step of a random walk; and a mirror
// that stopped somewhere on the way refuses nothing that PostgreSQL would do.
func TestMachine_GoSQLAndLuaSayTheSame(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	database, err := stack.CreateDatabase(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, database.Drop(context.Background())) })
	conn, err := pgx.Connect(ctx, database.URL)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	_, err = conn.Exec(ctx, `CREATE TABLE things (id text PRIMARY KEY, status text)`)
	require.NoError(t, err)
	f := newFront(t)

	rapid.Check(t, func(rt *rapid.T) {
		m := drawMachine(rt)
		guard, err := m.Guard(idempotency.Column{Table: pgx.Identifier{"things"}, Key: []string{"id"}, State: "status"})
		require.NoError(rt, err)
		states, mirror := newStates(t, f, m), newMirror(t, f, m)
		row, never := newRow(t, m), newRow(t, m)
		there := rapid.SampledFrom(m.Starts()).Draw(rt, "start")
		_, err = conn.Exec(ctx, `INSERT INTO things VALUES ($1, $2)`, row.Value(), there)
		require.NoError(rt, err)
		require.Equal(rt, "moved from ", answer(states.Move(ctx, row, "start", there)))

		seen := map[string]string{} // the answers by id
		for i := range rapid.IntRange(1, 12).Draw(rt, "steps") {
			to := rapid.SampledFrom(m.States()).Draw(rt, "to")
			id := fmt.Sprintf("%d %s", i, to)
			want := "refused from " + there + ", allowed " + strings.Join(m.Next(there), " ")
			switch {
			case there == to:
				want = "already"
			case m.Allows(there, to):
				want = "moved from " + there
				require.NoError(rt, mirror.Refuses(ctx, row, to, "one"), "a late mirror refuses what is allowed")
			}
			bySQL := func(row idempotency.Key) string {
				tx, err := conn.Begin(ctx)
				require.NoError(rt, err)
				got := answer(guard.Move(ctx, tx, to, row.Value()))
				require.NoError(rt, tx.Commit(ctx))
				return got
			}
			require.Equal(rt, want, bySQL(row), "SQL")
			require.Equal(rt, want, answer(states.Move(ctx, row, id, to)), "Lua")
			seen[id] = want
			require.Equal(rt, "not found", bySQL(never))
			if !slices.Contains(m.Starts(), to) {
				require.Equal(rt, "not found", answer(states.Move(ctx, never, id, to)))
			}
			if strings.HasPrefix(want, "moved") {
				there = to
			}
			if rapid.Bool().Draw(rt, "mirrored") {
				require.NoError(rt, mirror.Set(ctx, row, there, "one"))
				require.NoError(rt, f.Flush(ctx))
			}
			again := rapid.SampledFrom(slices.Sorted(maps.Keys(seen))).Draw(rt, "again")
			_, to, _ = strings.Cut(again, " ")
			require.Equal(rt, seen[again], answer(states.Move(ctx, row, again, to)))
		}
		require.Equal(rt, "already", answer(states.Move(ctx, row, "end", there)), "and both end where the walk does")
	})
}
