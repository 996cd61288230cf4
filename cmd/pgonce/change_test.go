package main

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

// complete is what an owner does at the end.
func complete(t *testing.T, pool *pgxpool.Pool, r *idempotency.Record) error {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Rollback(t.Context(), conn.Conn())) }()
	started, err := store.LockLease(t.Context(), conn, r.Owner())
	if err != nil {
		return err
	}
	_, err = store.CompleteLease(t.Context(), conn.Conn(), r, &idempotency.Completion{
		Request: idempotency.Request{Key: r.Key, Fingerprint: payload}, State: idempotency.StateSuccess, AttemptToken: r.AttemptToken,
		Acquired: idempotency.Acquisition{Started: started}, ResultType: "json/1", Result: []byte(`{"ok":true}`),
		Retention: time.Hour, ResultRetention: time.Hour,
	})
	return err
}

// A payment's owner has died, nobody may take over, and the provider says that it never charged.
func TestRehearsal_StalePayment(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	url := urlOf(pool)
	owner := leased(t, pool, "pay-1", idempotency.TakeoverManual)
	makeStale(t, pool, "pay-1")
	require.Equal(t, idempotency.VerdictManual, lease(t, pool, "pay-1", idempotency.TakeoverManual).Verdict)

	require.Contains(t, pgonce(t, url, "", "list", "--state", "TIMEOUT").out, "pay-1")
	require.Contains(t, pgonce(t, url, "", "get", "pay-1").out, "find out what it did")
	fail := []string{"fail", "pay-1", "--retryable", "--reason", "never charged, ticket 4711", "--actor", "ada"}

	before := everything(t, pool)
	for _, answer := range []string{"", "no\n", "y\n", "yes please\n"} {
		a := pgonce(t, url, answer, fail...)
		require.Equal(t, exitRefused, a.code)
		require.Contains(t, a.err, "that may happen twice")
		require.Contains(t, a.err, "TIMEOUT", "what is about to be changed is shown")
		require.Contains(t, a.err, "not confirmed: nothing was changed")
		require.Empty(t, a.out)
	}
	require.Equal(t, before, everything(t, pool))

	a := pgonce(t, url, "yes\n", fail...)
	require.Zero(t, a.code, a.err)
	require.Regexp(t, `^payment\.capture#[0-9a-f]{16}: failed, retryable \(fence \d+\)\n$`, a.out)

	// Whatever the old owner still sends is refused.
	_, err := store.Renew(t.Context(), pool, owner.Owner(), time.Minute)
	require.ErrorIs(t, err, idempotency.ErrLeaseLost)
	require.ErrorIs(t, complete(t, pool, &owner), idempotency.ErrLeaseLost)
	_, err = store.FailLease(t.Context(), pool, &owner, &idempotency.Completion{
		ErrorCode: "X", ErrorMessage: "x", Retention: time.Hour, ResultRetention: time.Hour,
	}, false)
	require.ErrorIs(t, err, idempotency.ErrLeaseLost)
	require.ErrorIs(t, store.RecordStep(t.Context(), pool, owner.Owner(), &idempotency.Step{Name: "s", Result: []byte("1"), ResultType: "json/1"}), idempotency.ErrLeaseLost)

	// And the client's retry runs.
	again := leased(t, pool, "pay-1", idempotency.TakeoverManual)
	require.Equal(t, 2, again.Attempt)
	require.Greater(t, again.Fence, owner.Fence+1)
	require.NoError(t, complete(t, pool, &again))

	v := object(t, url, exitOK, "trace", "pay-1")
	var events []string
	for _, row := range v["attempts"].([]any) {
		m := row.(map[string]any)
		events = append(events, fmt.Sprint(m["event"], " ", m["outcome"], " ", m["actor"], " ", m["reason"]))
	}
	require.Equal(t, []string{
		"ACQUIRED PROCESSING <nil> <nil>", "OPERATOR FAILED ada never charged, ticket 4711", "ACQUIRED PROCESSING <nil> <nil>",
	}, events)
	require.Equal(t, "SUCCESS", v["records"].([]any)[0].(map[string]any)["state"])
}

// Every earlier attempt is ended, not only the last one: otherwise the rule RESOLVE would still ask for somebody who knows.
func TestFail_RetryableEndsEveryAttemptOfTheLife(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	leased(t, pool, "k", idempotency.TakeoverResolve)
	for range 2 {
		makeStale(t, pool, "k")
		a, err := store.AcquireLease(t.Context(), pool, &idempotency.LeaseRequest{
			Request:      idempotency.Request{Key: lease(t, pool, "k", "RESOLVE").Record.Key, Fingerprint: payload},
			AttemptToken: idempotency.NewAttemptToken(), Lease: time.Minute, Takeover: idempotency.TakeoverResolve, CanResolve: true,
		})
		require.NoError(t, err)
		require.Equal(t, idempotency.VerdictResolve, a.Verdict)
	}
	makeStale(t, pool, "k")
	v := object(t, urlOf(pool), exitOK, "fail", "k", "--retryable", "--reason", "r", "--yes")
	require.NotEmpty(t, v["actor"], "the user of this machine")
	require.Equal(t, "not asked", v["redis"])
	require.EqualValues(t, []int64{3}, column[int64](t, pool, `SELECT count(*) FROM idempotency.attempts WHERE event = 'OPERATOR' AND ended_at IS NOT NULL`))
	require.Equal(t, 4, leased(t, pool, "k", idempotency.TakeoverResolve).Attempt)
}

func TestFail_FinalIsWhatEveryCallerGets(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	leased(t, pool, "k", idempotency.TakeoverRerun)
	refused := pgonce(t, urlOf(pool), "", "fail", "k", "--reason", "secret words", "--yes")
	require.Equal(t, exitRefused, refused.code)
	require.Contains(t, refused.err, "its lease runs until")

	makeStale(t, pool, "k")
	a := pgonce(t, urlOf(pool), "", "fail", "k", "--reason", "secret words", "--yes", "--code", "CHARGED_BY_HAND", "--message", "call us", "--retention", "forever")
	require.Zero(t, a.code, a.err)
	got := lease(t, pool, "k", idempotency.TakeoverRerun)
	require.Equal(t, idempotency.VerdictReplay, got.Verdict)
	require.Equal(t, "CHARGED_BY_HAND: call us", got.Record.ErrorCode+": "+got.Record.ErrorMessage, "never the reason")
	require.True(t, got.Record.ExpiresAt.IsZero())

	// An outcome that callers have seen stays, whatever the flags.
	before := everything(t, pool)
	for _, flag := range []string{"--retryable", "--force"} {
		a = pgonce(t, urlOf(pool), "", "fail", "k", "--reason", "r", "--yes", flag)
		require.Equal(t, exitRefused, a.code)
		require.Contains(t, a.err, "it is FAILED already")
	}
	require.Equal(t, before, everything(t, pool))
}

func TestFail_RefusesWhatIsNotRunning(t *testing.T) {
	t.Parallel()
	pool := audited(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, expires_at)
		VALUES ('acme', 'order.create', 'token', 'INIT', 0, 0, 0, now(), now() + interval '1 day')`)
	require.NoError(t, err)
	before := everything(t, pool)
	for value, why := range map[string]string{
		"k-1002": "it is SUCCESS already", "k-1003": "it is FAILED already", "k-0800": "it is EXPIRED", "token": "it is INIT",
		"k-none": "there is no record",
	} {
		a := pgonce(t, urlOf(pool), "", "fail", value, "--reason", "r", "--yes", "--force")
		require.Equal(t, exitRefused, a.code, value)
		require.Contains(t, a.err, why)
	}
	a := pgonce(t, urlOf(pool), "", "expire", "k-2001", "--reason", "r", "--yes")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "it is PROCESSING")
	require.Equal(t, before, everything(t, pool))
}

// An owner that is completing has the row: nobody waits for it.
func TestFail_DoesNotWaitForAnOwnerThatCompletes(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	owner := leased(t, pool, "k", idempotency.TakeoverRerun)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	_, err = store.LockLease(t.Context(), tx, owner.Owner())
	require.NoError(t, err)
	began := time.Now()
	a := pgonce(t, urlOf(pool), "", "fail", "k", "--reason", "r", "--yes", "--force")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "its owner is completing it right now")
	require.Less(t, time.Since(began), 5*time.Second)
}

// Forced while the owner completes: one of the two wins, and both know which.
func TestFail_RacesWithItsOwner(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	failed, succeeded := 0, 0
	for i := 0; i < 150 || i < 3000 && (failed == 0 || succeeded == 0); i++ { // each of them wins, on whatever machine
		owner := leased(t, pool, fmt.Sprint("k", i), idempotency.TakeoverManual)
		var group sync.WaitGroup
		var owned, operated error
		late := time.Duration(i) * 10 * time.Microsecond
		group.Go(func() {
			if i%4 == 1 {
				time.Sleep(late)
			}
			owned = complete(t, pool, &owner)
		})
		group.Go(func() {
			if i%2 == 0 {
				time.Sleep(late)
			}
			_, operated = store.FailByHand(t.Context(), pool, owner.Key, &idempotency.OperatorFailure{
				Blame: idempotency.Blame{Actor: "a", Reason: "r"}, Code: "C", Message: "m", Retention: time.Hour, Force: true,
			})
		})
		group.Wait()
		state := column[string](t, pool, `SELECT state FROM idempotency.records WHERE key = $1`, owner.Key.Value())[0]
		rows := column[int64](t, pool, `SELECT count(*) FROM idempotency.attempts WHERE key = $1 AND event = 'OPERATOR'`, owner.Key.Value())[0]
		switch state {
		case "SUCCESS":
			succeeded++
			require.NoError(t, owned)
			require.ErrorIs(t, operated, idempotency.ErrRefused)
			require.Zero(t, rows)
		case "FAILED":
			failed++
			require.NoError(t, operated)
			require.True(t, errors.Is(owned, idempotency.ErrLeaseLost) || errors.Is(owned, idempotency.ErrRowLocked), "%v", owned)
			require.EqualValues(t, 1, rows)
		default: // both came at the same moment, and neither waits
			require.ErrorIs(t, operated, idempotency.ErrRefused)
			require.ErrorIs(t, owned, idempotency.ErrRowLocked)
		}
	}
	t.Logf("%d ended by the operator, %d by their owners", failed, succeeded)
	require.Positive(t, failed)
	require.Positive(t, succeeded)
}

// The fronts' names are made by the front itself: what expire evicts is what a service has published.
func TestCase_L21_ExpireEvictsWhatTheServicePublished(t *testing.T) {
	t.Parallel()
	pool, node := audited(t), newRedis(t)
	for _, prefix := range []string{redisfront.DefaultPrefix, "shop:"} {
		front := newFront(t, node, prefix)
		value := map[string]string{redisfront.DefaultPrefix: "k-1002", "shop:": "k-3001"}[prefix]
		lines, _, err := store.Find(t.Context(), pool, idempotency.KeyFilter{Value: value}, 1)
		require.NoError(t, err)
		key := lines[0].Key
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		record, found, err := store.Lookup(t.Context(), conn.Conn(), key)
		conn.Release()
		require.NoError(t, err)
		require.True(t, found)
		ask := idempotency.Ask{Key: key, Fingerprint: record.Fingerprint, Epoch: "e"}
		front.Publish(t.Context(), idempotency.Entry{Record: record, Epoch: "e", Life: time.Hour})
		require.NoError(t, front.Flush(t.Context()))
		_, found, err = front.Lookup(t.Context(), ask)
		require.NoError(t, err)
		require.True(t, found)

		a := pgonce(t, urlOf(pool), "", "expire", value, "--reason", "r", "--yes", "--redis", node.URL(), "--redis-prefix", prefix)
		require.Zero(t, a.code, a.err)
		require.Contains(t, a.err, "MAY RUN A SECOND TIME")
		require.Contains(t, a.out, "expired (fence ")
		require.Contains(t, a.out, "Redis: evicted")
		_, found, err = front.Lookup(t.Context(), ask)
		require.NoError(t, err)
		require.False(t, found)
		after, _, err := store.Find(t.Context(), pool, idempotency.KeyFilter{Value: value}, 1)
		require.NoError(t, err)
		require.Equal(t, idempotency.StateExpired, after[0].State)
		require.Greater(t, after[0].Fence, lines[0].Fence)
		require.Equal(t, lines[0].Generation, after[0].Generation)
	}
	v := object(t, urlOf(pool), exitOK, "expire", "k-1002", "--reason", "again", "--yes", "--redis", node.URL())
	require.Equal(t, "nothing, it was EXPIRED already", v["did"])
	require.Equal(t, "evicted", v["redis"])
	require.Equal(t, []int64{1}, column[int64](t, pool, `SELECT count(*) FROM idempotency.attempts WHERE key = 'k-1002'`))
}

func TestExpire_RedisThatIsAwayIsToldAndCanBeToldLater(t *testing.T) {
	t.Parallel()
	pool, node := audited(t), newRedis(t)
	require.NoError(t, node.Kill())
	a := pgonce(t, urlOf(pool), "", "expire", "k-1002", "--reason", "r", "--yes", "--redis", node.URL())
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.out, "expired (fence ", "PostgreSQL has it")
	require.Contains(t, a.err, "Redis has NOT been told: asked 4 times")
	require.Contains(t, a.err, "pgonce evict --tenant acme --operation order.create --redis ... k-1002")
	require.NotContains(t, a.err, node.URL(), "a password")

	evict := []string{"evict", "k-1002", "--tenant", "acme", "--operation", "order.create", "--redis", node.URL()}
	require.Equal(t, exitRefused, pgonce(t, "", "", evict...).code)
	require.NoError(t, node.Start(t.Context()))
	require.Equal(t, "evicted", object(t, "", exitOK, evict...)["redis"])

	// Back meanwhile: the command asks again by itself. No process has to start in its time: a replica becomes the master.
	options, err := redis.ParseURL(node.URL())
	require.NoError(t, err)
	admin := redis.NewClient(options)
	defer func() { require.NoError(t, admin.Close()) }()
	require.NoError(t, admin.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
	promoted := make(chan error, 1)
	time.AfterFunc(700*time.Millisecond, func() { promoted <- admin.ReplicaOf(t.Context(), "NO", "ONE").Err() })
	b := pgonce(t, urlOf(pool), "", "expire", "k-3002", "--reason", "r", "--yes", "--redis", node.URL())
	require.NoError(t, <-promoted)
	require.Zero(t, b.code, b.err)
}

// Expired by hand the operation runs again, as a new life of the key.
func TestExpire_NextCallerRunsAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	first := leased(t, pool, "k", idempotency.TakeoverManual)
	require.NoError(t, complete(t, pool, &first))
	require.Equal(t, idempotency.VerdictReplay, lease(t, pool, "k", idempotency.TakeoverManual).Verdict)
	a := pgonce(t, urlOf(pool), "yes\n", "expire", "k", "--reason", "cancelled by hand", "--actor", "ada")
	require.Zero(t, a.code, a.err)
	require.Contains(t, a.err, "MAY RUN A SECOND TIME")
	require.Contains(t, a.err, "No --redis")
	again := leased(t, pool, "k", idempotency.TakeoverManual)
	require.Equal(t, 1, again.Attempt)
	require.Greater(t, again.Generation, first.Generation)
	require.Equal(t, []string{"OPERATOR ada cancelled by hand"}, column[string](t, pool,
		`SELECT event || ' ' || actor || ' ' || reason FROM idempotency.attempts WHERE event = 'OPERATOR' AND outcome IS NULL`))
}
