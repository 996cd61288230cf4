package localfront_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/localfront"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	create  = idempotency.Operation{Name: "order.create"}
	payload = idempotency.FingerprintBytes([]byte("payload"))
)

// kinds are the caches a front can stand on.
var kinds = map[string]func(*localfront.Config) (*localfront.Front, error){"go-cache": localfront.New, "otter": localfront.NewOtter}

// fronts are one of every kind.
func fronts(t *testing.T, cfg *localfront.Config) map[string]*localfront.Front {
	t.Helper()
	all := map[string]*localfront.Front{}
	for name, newFront := range kinds {
		f, err := newFront(cfg)
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, f.Close())
			require.NoError(t, f.Close(), "twice")
		})
		all[name] = f
	}
	return all
}

func newKey(t testing.TB, value string) idempotency.Key {
	t.Helper()
	key, err := create.Key(idempotency.SingleTenant, value)
	require.NoError(t, err)
	return key
}

func success(key idempotency.Key, fence int64, result string) idempotency.Entry {
	return idempotency.Entry{Epoch: "one", Life: time.Hour, Record: idempotency.Record{
		Key: key, State: idempotency.StateSuccess, Fence: fence, Generation: fence, Attempt: 1, Fingerprint: payload,
		AttemptToken: idempotency.NewAttemptToken(), ResultType: "bytes/1", Result: []byte(result),
	}}
}

func about(key idempotency.Key) idempotency.Ask {
	return idempotency.Ask{Key: key, Fingerprint: payload, Epoch: "one"}
}

func lookup(t testing.TB, f *localfront.Front, ask idempotency.Ask) (result string, found bool) {
	t.Helper()
	r, found, err := f.Lookup(context.Background(), ask)
	require.NoError(t, err)
	return string(r.Result), found
}

// A hit is the whole record, as PostgreSQL would have given it, and only for who asks for that very one.
func TestCase_K06_AHitIsTheRecord_OnlyForTheSameKeyEpochAndFingerprint(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, key := t.Context(), newKey(t, "k")
			e := success(key, 1, "answer")
			f.Publish(ctx, e)
			got, found, err := f.Lookup(ctx, about(key))
			require.NoError(t, err)
			require.True(t, found)
			require.Equal(t, e.Record, got)

			otherKey, err := create.Key("another tenant", "k")
			require.NoError(t, err)
			for name, ask := range map[string]idempotency.Ask{
				"key":         {Key: otherKey, Fingerprint: payload, Epoch: "one"},
				"epoch":       {Key: key, Fingerprint: payload, Epoch: "two"},
				"fingerprint": {Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("other")), Epoch: "one"},
			} {
				_, found := lookup(t, f, ask)
				require.False(t, found, name)
			}
			require.NoError(t, f.Evict(ctx, key))
			_, found = lookup(t, f, about(key))
			require.False(t, found)
		})
	}
}

// Nothing unfinished is kept: who has it would say "in progress" for ever.
func TestCase_K01_NothingUnfinishedIsKept(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, &localfront.Config{MaxBytes: 64 << 10}) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, change := range map[string]func(*idempotency.Entry){
				"no epoch":  func(e *idempotency.Entry) { e.Epoch = "" },
				"no life":   func(e *idempotency.Entry) { e.Life = 0 },
				"running":   func(e *idempotency.Entry) { e.Record.State = idempotency.StateProcessing },
				"retryable": func(e *idempotency.Entry) { e.Record.State, e.Record.Retryable = idempotency.StateFailed, true },
				"too big":   func(e *idempotency.Entry) { e.Record.Result = make([]byte, 9<<10) },
			} {
				key := newKey(t, name)
				e := success(key, 1, "x")
				change(&e)
				f.Publish(t.Context(), e)
				_, found := lookup(t, f, about(key))
				require.False(t, found, name)
			}
			// What is too big to keep still makes what is there old.
			key := newKey(t, "grown")
			f.Publish(t.Context(), success(key, 1, "small"))
			grown := success(key, 2, "")
			grown.Record.Result = make([]byte, 9<<10)
			f.Publish(t.Context(), grown)
			_, found := lookup(t, f, about(key))
			require.False(t, found)
		})
	}
}

func TestFront_AnOlderFenceNeverReplacesANewerOne(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t, "k")
			f.Publish(t.Context(), success(key, 2, "new"))
			f.Publish(t.Context(), success(key, 1, "old"))
			result, _ := lookup(t, f, about(key))
			require.Equal(t, "new", result)
			other := success(key, 1, "another epoch")
			other.Epoch = "two"
			f.Publish(t.Context(), other)
			ask := about(key)
			ask.Epoch = "two"
			result, _ = lookup(t, f, ask)
			require.Equal(t, "another epoch", result)
		})
	}
}

func TestFront_EntriesEndByThemselves(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t, "k")
			e := success(key, 1, "x")
			found := false
			for e.Life = 100 * time.Millisecond; !found; e.Life *= 2 { // a slow machine may come too late
				began := time.Now()
				f.Publish(t.Context(), e)
				_, found = lookup(t, f, about(key))
				require.True(t, found || time.Since(began) > e.Life)
			}
			time.Sleep(e.Life) // which is twice that of the last one
			_, found = lookup(t, f, about(key))
			require.False(t, found)
			// The name is free again, and the books are right.
			f.Publish(t.Context(), success(key, 1, "anew"))
			result, _ := lookup(t, f, about(key))
			require.Equal(t, "anew", result)
			require.Equal(t, 1, f.Stats().Records)
		})
	}
}

// Case K02: nobody gets another one's bytes.
func TestCase_K02_EntriesAreCopiedInAndOut(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t, "k")
			e := success(key, 1, "untouched")
			f.Publish(t.Context(), e)
			copy(e.Record.Result, "spoilt!!!")
			for range 3 {
				r, found, err := f.Lookup(t.Context(), about(key))
				require.NoError(t, err)
				require.True(t, found)
				require.Equal(t, "untouched", string(r.Result))
				copy(r.Result, "spoilt!!!")
			}
		})
	}
}

// A million keys go through, and neither records nor bytes nor the heap grow beyond their bounds.
func TestFront_AMillionKeysStayWithinTheBounds(t *testing.T) { //nolint:paralleltest // the heap is everybody's
	const perKey = 1500
	for name, newFront := range kinds {
		t.Run(name, func(t *testing.T) {
			f, err := newFront(nil)
			require.NoError(t, err)
			defer func() { require.NoError(t, f.Close()) }()
			before := heap()
			result := make([]byte, perKey)
			for i := range keys {
				e := success(newKey(t, fmt.Sprint(i)), 1, "")
				e.Record.Result = result
				f.Publish(t.Context(), e)
				if i%(keys/10) == 0 {
					s := f.Stats()
					require.LessOrEqual(t, s.Records, localfront.DefaultMaxRecords)
					require.LessOrEqual(t, s.Bytes, int64(localfront.DefaultMaxBytes))
				}
			}
			s := f.Stats()
			require.LessOrEqual(t, s.Records, localfront.DefaultMaxRecords)
			require.Greater(t, s.Records, localfront.DefaultMaxRecords/2)
			grown := int64(heap()) - int64(before) //nolint:gosec // far below
			require.LessOrEqual(t, grown, int64(64<<20))
			require.Greater(t, grown, s.Bytes/2, "what the bytes claim to be is about what they are")
		})
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestCase_K05_BytesAreBoundedToo(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, &localfront.Config{MaxBytes: 256 << 10}) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for i := range 1000 {
				e := success(newKey(t, fmt.Sprint(i)), 1, "")
				e.Record.Result = make([]byte, 10<<10)
				f.Publish(t.Context(), e)
			}
			s := f.Stats()
			require.LessOrEqual(t, s.Bytes, int64(256<<10))
			require.GreaterOrEqual(t, s.Records, 10)
		})
	}
}

func TestFront_ConcurrentUse(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, &localfront.Config{MaxRecords: 50}) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := make([]idempotency.Key, 100)
			for i := range all {
				all[i] = newKey(t, fmt.Sprint(i))
			}
			var group sync.WaitGroup
			for g := range 8 {
				group.Go(func() {
					for i := range 5000 {
						key := all[(i*7+g)%len(all)]
						switch i % 10 {
						case 0:
							f.Publish(context.Background(), success(key, int64(i), key.Value()))
						case 1:
							_ = f.Evict(context.Background(), key)
						default:
							if r, found, _ := f.Lookup(context.Background(), about(key)); found && string(r.Result) != key.Value() {
								t.Errorf("%s has the answer of %s", key.Value(), r.Result)
							}
						}
					}
				})
			}
			group.Wait()
			require.LessOrEqual(t, f.Stats().Records, 50)
		})
	}
}

func TestMemo_OneRequestGetsOneAnswer(t *testing.T) {
	t.Parallel()
	for name, f := range fronts(t, nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			request, key := localfront.WithMemo(t.Context()), newKey(t, "k")
			f.Publish(request, success(key, 1, "answer"))
			require.NoError(t, f.Evict(t.Context(), key)) // by somebody else
			_, found := lookup(t, f, about(key))
			require.False(t, found)
			r, found, err := f.Lookup(request, about(key))
			require.NoError(t, err)
			require.True(t, found)
			require.Equal(t, "answer", string(r.Result))
			ask := about(key)
			ask.Epoch = "two"
			_, found, _ = f.Lookup(request, ask)
			require.False(t, found, "within an epoch")
			require.NoError(t, f.Evict(request, key))
			_, found, _ = f.Lookup(request, about(key))
			require.False(t, found)
		})
	}
}

func TestNew_RefusesAWrongConfig(t *testing.T) {
	t.Parallel()
	for field, config := range map[string]*localfront.Config{
		"MaxRecords": {MaxRecords: -1}, "MaxBytes": {MaxBytes: 1000}, "MaxAge": {MaxAge: 2 * time.Hour},
	} {
		for _, newFront := range kinds {
			_, err := newFront(config)
			require.ErrorIs(t, err, idempotency.ErrConfig)
			require.ErrorContains(t, err, field)
		}
	}
}

func BenchmarkLookup(b *testing.B) {
	for name, newFront := range kinds {
		b.Run(name, func(b *testing.B) {
			f, err := newFront(nil)
			require.NoError(b, err)
			defer func() { _ = f.Close() }()
			key := newKey(b, "8e03978e-40d5-43dd-bc93-6894a57f9324")
			e := success(key, 1, "")
			e.Record.Result = make([]byte, 300)
			f.Publish(context.Background(), e)
			b.ReportAllocs()
			for b.Loop() {
				_, _, _ = f.Lookup(context.Background(), about(key))
			}
		})
	}
}
