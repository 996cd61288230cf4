package redisfront_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/redisfront"
)

var (
	stack    *devstack.Stack
	redisURL string
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	stack, err = devstack.Start(context.Background(), &devstack.Config{Redis: true, Out: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = stack.Stop() }()
	redisURL = stack.RedisURL()
	return m.Run()
}

// newUnmanagedClient is one that the test closes itself.
func newUnmanagedClient(t *testing.T) *redis.Client {
	t.Helper()
	options, err := redis.ParseURL(redisURL)
	require.NoError(t, err)
	options.ContextTimeoutEnabled = true
	return redis.NewClient(options)
}

func newClient(t *testing.T) *redis.Client {
	t.Helper()
	client := newUnmanagedClient(t)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

var create = idempotency.Operation{Name: "order.create"}

var keys atomic.Int64

// newKey returns a key that no other test uses.
func newKey(t *testing.T) idempotency.Key {
	t.Helper()
	key, err := create.Key(idempotency.SingleTenant, fmt.Sprintf("%s-%d", t.Name(), keys.Add(1)))
	require.NoError(t, err)
	return key
}

// runID makes prefixes differ from those of earlier runs, which a server of PGONCE_REDIS_URL still has.
var runID = rand.Text()[:8]

// newPrefix returns a prefix that no other test uses.
func newPrefix() string { return fmt.Sprintf("%s%s-%d:", redisfront.DefaultPrefix, runID, keys.Add(1)) }

// patience is longer than a service would wait: what most tests ask is not how long Redis took.
const patience = 10 * time.Second

// newFront returns a patient front with a prefix of its own.
func newFront(t *testing.T, change ...func(*redisfront.Config)) *redisfront.Front {
	t.Helper()
	cfg := &redisfront.Config{Prefix: newPrefix(), Timeout: patience}
	for _, c := range change {
		c(cfg)
	}
	f, err := redisfront.New(newClient(t), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

var (
	payload = idempotency.FingerprintBytes([]byte("payload"))
	other   = idempotency.FingerprintBytes([]byte("other"))
)

// about asks for a key in the epoch "one".
func about(key idempotency.Key) idempotency.Ask {
	return idempotency.Ask{Key: key, Fingerprint: payload, Epoch: "one"}
}

// success is a record as the store returns it after a commit, in the epoch "one", with an hour to live.
func success(key idempotency.Key, fence int64, result string) idempotency.Entry {
	now := time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.UTC)
	return idempotency.Entry{Epoch: "one", Life: time.Hour, Mark: idempotency.NewAttemptToken(), Record: idempotency.Record{
		Key: key, State: idempotency.StateSuccess, Fence: fence, Generation: fence, Attempt: 1, Fingerprint: payload,
		AttemptToken: idempotency.NewAttemptToken(), Executor: "host:1:aa", Client: "someone", CreatedAt: now, AcquiredAt: now,
		CompletedAt: now.Add(time.Millisecond), ExpiresAt: now.Add(time.Hour), ResultType: "bytes/1", Result: []byte(result),
	}}
}

// publish stores an entry and waits until it is there.
func publish(t *testing.T, f *redisfront.Front, e idempotency.Entry) {
	t.Helper()
	f.Publish(t.Context(), e)
	require.NoError(t, f.Flush(t.Context()))
}

// end ends a mark and waits until it is gone.
func end(t *testing.T, f *redisfront.Front, key idempotency.Key, mark idempotency.AttemptToken) {
	t.Helper()
	f.End(t.Context(), key, mark)
	require.NoError(t, f.Flush(t.Context()))
}

// lookup returns the result of a key's entry; found is false for a miss.
func lookup(t *testing.T, f *redisfront.Front, ask idempotency.Ask) (result string, found bool) {
	t.Helper()
	r, found, err := f.Lookup(t.Context(), ask)
	require.NoError(t, err)
	return string(r.Result), found
}

func begin(t *testing.T, f *redisfront.Front, ask idempotency.Ask, mark idempotency.AttemptToken) error {
	t.Helper()
	_, _, err := f.Begin(t.Context(), ask, mark, ttl)
	return err
}

// events collects what a front tells.
type events struct {
	mu   sync.Mutex
	told []idempotency.Event
}

func newEvents() *events { return &events{} }

func (e *events) add(_ context.Context, event idempotency.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.told = append(e.told, event)
}

// count returns how many events of a kind were told.
func count[E idempotency.Event](e *events) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.told {
		if _, is := event.(E); is {
			n++
		}
	}
	return n
}
