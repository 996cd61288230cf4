package txn_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// machine drives the library and the models of a few keys with the same actions.
type machine struct {
	ctx    context.Context
	pool   *pgxpool.Pool // the service's
	direct *pgxpool.Pool
	runner *txn.Runner
	iso    pgx.TxIsoLevel
	locker *pgxpool.Conn
	keys   []*model
	values []string
}

var errBoom = errors.New("boom")

// call makes one call, alone or in a transaction of its own.
func (m *machine) call(t *rapid.T) {
	key := rapid.SampledFrom(m.keys).Draw(t, "key")
	payload := rapid.IntRange(0, 1).Draw(t, "payload")
	outcome := rapid.SampledFrom([]string{"success", "error", "final"}).Draw(t, "outcome")
	outer := rapid.SampledFrom([]string{"none", "none", "commit", "rollback"}).Draw(t, "outer")
	req := key.req[payload]
	req.Retry = rapid.Bool().Draw(t, "retry")
	want := key.verdict(payload)

	runs, value := 0, order{}
	fn := func(ctx context.Context, tx pgx.Tx) (o order, err error) {
		runs++
		o, err = insertOrder(ctx, tx, req.Key.Value())
		require.NoError(t, err)
		value = o
		switch outcome {
		case "error":
			return o, errBoom
		case "final":
			return o, txn.Final("no", errBoom)
		}
		return o, nil
	}
	var res txn.Result[order]
	var err error
	if outer == "none" {
		res, err = txn.WithIdempotency(m.ctx, m.runner, req, fn)
	} else {
		res, err = m.joined(t, req, fn, outer == "commit", want == idempotency.VerdictRun && outcome != "error")
	}

	require.Equal(t, want == idempotency.VerdictRun, runs == 1, "entered %d times, verdict %q, error %v", runs, want, err)
	switch want {
	case idempotency.VerdictRun:
		m.ran(t, key, payload, outcome, outer, value, res, err)
	case idempotency.VerdictReplay:
		m.replayed(t, key, res, err)
	case idempotency.VerdictMismatch:
		require.ErrorIs(t, err, idempotency.ErrMismatch)
	case idempotency.VerdictInProgress:
		require.ErrorIs(t, err, idempotency.ErrInProgress)
	case idempotency.VerdictGone:
		require.ErrorIs(t, err, idempotency.ErrResultExpired)
	case idempotency.VerdictWrongMode:
		require.ErrorIs(t, err, idempotency.ErrWrongMode)
	}
}

// joined makes the call in a transaction that goes on afterwards, and then ends as told.
func (m *machine) joined(
	t *rapid.T, req idempotency.Request, fn func(context.Context, pgx.Tx) (order, error), commit, recorded bool,
) (txn.Result[order], error) {
	tx, err := m.pool.BeginTx(m.ctx, pgx.TxOptions{IsoLevel: m.iso})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(m.ctx) }()
	joined, err := txn.WithIdempotencyTx(m.ctx, m.runner, tx, req, fn)
	_, goesOn := tx.Exec(m.ctx, `SELECT 1`)
	require.NoError(t, goesOn, "the caller's transaction is alive, whatever became of the call (%v)", err)
	end := tx.Rollback
	if commit {
		end = tx.Commit
	}
	require.NoError(t, end(m.ctx))
	if joined == nil {
		return txn.Result[order]{}, err
	}
	after := joined.AfterCommit(m.ctx)
	if recorded && !commit {
		require.ErrorIs(t, after, idempotency.ErrNotRecorded)
	} else {
		require.NoError(t, after)
	}
	return joined.Result, err
}

// ran checks a call whose function ran, and tells the model.
func (m *machine) ran(t *rapid.T, key *model, payload int, outcome, outer string, value order, res txn.Result[order], err error) {
	if outcome == "error" {
		require.ErrorIs(t, err, errBoom)
		require.NotErrorIs(t, err, idempotency.ErrFailed)
		return
	}
	require.False(t, res.Replayed)
	require.Equal(t, value, res.Value)
	next := &modelRecord{state: idempotency.StateSuccess, payload: payload, value: value, hasValue: true}
	if outcome == "final" {
		var failed *idempotency.FailedError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, "no", failed.Code)
		require.ErrorIs(t, err, errBoom)
		next.state, next.code = idempotency.StateFailed, "no"
	} else {
		require.NoError(t, err)
	}
	require.Equal(t, next.state, res.Record.State)
	require.Equal(t, 1, res.Record.Attempt)
	require.Equal(t, res.Record.Fence, res.Record.Generation)
	require.Greater(t, res.Record.Fence, key.top)
	if outer == "rollback" {
		return
	}
	key.record = next
	if outcome == "final" {
		key.failures++
		return
	}
	key.successes++
}

func (m *machine) replayed(t *rapid.T, key *model, res txn.Result[order], err error) {
	if key.record.state == idempotency.StateSuccess {
		require.NoError(t, err)
	} else {
		var failed *idempotency.FailedError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, key.record.code, failed.Code)
		require.NotErrorIs(t, err, errBoom, "a text is stored, not an error")
	}
	require.True(t, res.Replayed)
	want := key.record.value
	if key.record.gone {
		want = order{} // a failure outlives its body
	}
	require.Equal(t, want, res.Value)
	require.Equal(t, key.top, res.Record.Fence)
}

// update changes a record by SQL: what other parts of the system, and time, do to it.
func (m *machine) update(t *rapid.T, key *model, set string, args ...any) {
	k := key.req[0].Key
	tag, err := m.direct.Exec(m.ctx, `UPDATE idempotency.records SET `+set+` WHERE tenant = $1 AND operation = $2 AND key = $3`,
		append([]any{k.Tenant(), k.Operation(), k.Value()}, args...)...)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}

// pick draws a key whose record the action is for.
func (m *machine) pick(t *rapid.T, fits func(*model) bool) *model {
	var fitting []*model
	for _, key := range m.keys {
		if fits(key) {
			fitting = append(fitting, key)
		}
	}
	if len(fitting) == 0 {
		t.Skip("no such key")
	}
	return rapid.SampledFrom(fitting).Draw(t, "key")
}

func (m *machine) expire(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.record != nil && !k.record.past })
	m.update(t, key, `expires_at = statement_timestamp()`)
	key.record.past = true
}

func (m *machine) dropResult(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.record != nil && k.record.hasValue && !k.record.gone })
	m.update(t, key, rapid.SampledFrom([]string{`result = NULL`, `result_expires_at = statement_timestamp()`}).Draw(t, "how"))
	key.record.gone = true
}

func (m *machine) purge(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.record != nil && k.record.expired() })
	_, err := m.direct.Exec(m.ctx, `DELETE FROM idempotency.records WHERE key = $1`, key.req[0].Key.Value())
	require.NoError(t, err)
	key.record = nil
}

// plant puts a record where none is alive: an issued token, or what the leased mode leaves.
func (m *machine) plant(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.record == nil || k.record.expired() })
	payload := rapid.IntRange(0, 1).Draw(t, "payload")
	req, token := key.req[payload], idempotency.NewAttemptToken()
	kind := rapid.SampledFrom([]string{"INIT", "live", "timed out", "retryable"}).Draw(t, "kind")
	next := &modelRecord{state: idempotency.StateProcessing, payload: payload}
	const names = `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, expires_at`
	err := pgx.BeginFunc(m.ctx, m.direct, func(tx pgx.Tx) error {
		if _, err := tx.Exec(m.ctx, `DELETE FROM idempotency.records WHERE key = $1`, req.Key.Value()); err != nil {
			return err
		}
		if kind == "INIT" {
			next.state, next.payload = idempotency.StateInit, -1
			_, err := tx.Exec(m.ctx, names+`) SELECT $1, $2, $3, 'INIT', f, f, 0, now(), now() + interval '1 day'
				FROM nextval('idempotency.fence') AS f`, req.Key.Tenant(), req.Key.Operation(), req.Key.Value())
			return err
		}
		lease := map[string]string{"live": "1 hour", "timed out": "-1 hour"}[kind]
		if kind == "retryable" {
			next.state, next.retryable, next.code = idempotency.StateFailed, true, "later"
		}
		_, err := tx.Exec(m.ctx, names+`, acquired_at, fingerprint, attempt_token, executor, takeover, lease_expires_at, completed_at,
				retryable, error_code, error_message)
			SELECT $1, $2, $3, $4::text, f, f, 1, now(), now() + interval '1 day', now(), $5, $6, 'model', 'RERUN',
				CASE WHEN $4 = 'PROCESSING' THEN now() + $7::text::interval END, CASE WHEN $4 = 'FAILED' THEN now() END,
				$4 = 'FAILED', CASE WHEN $4 = 'FAILED' THEN 'later' END, CASE WHEN $4 = 'FAILED' THEN 'later' END
			FROM nextval('idempotency.fence') AS f`,
			req.Key.Tenant(), req.Key.Operation(), req.Key.Value(), string(next.state), req.Fingerprint.Bytes(), token[:], lease)
		return err
	})
	require.NoError(t, err)
	key.record = next
}

// rescue ends a leased record, as the compensator or a person does.
func (m *machine) rescue(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.record != nil && k.record.state == idempotency.StateProcessing })
	retryable := rapid.Bool().Draw(t, "retryable")
	m.update(t, key, `state = 'FAILED', fence = nextval('idempotency.fence'), lease_expires_at = NULL, completed_at = now(),
		retryable = $4, error_code = 'rescued', error_message = 'rescued'`, retryable)
	key.record.state, key.record.retryable, key.record.code = idempotency.StateFailed, retryable, "rescued"
}

func (m *machine) lock(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return !k.locked })
	require.NoError(t, m.locker.QueryRow(m.ctx, `SELECT pg_try_advisory_lock($1)`, key.req[0].Key.LockID()).Scan(&key.locked))
	require.True(t, key.locked, "no call leaves its lock behind")
}

func (m *machine) unlock(t *rapid.T) {
	key := m.pick(t, func(k *model) bool { return k.locked })
	require.NoError(t, m.locker.QueryRow(m.ctx, `SELECT NOT pg_advisory_unlock($1)`, key.req[0].Key.LockID()).Scan(&key.locked))
}

// check compares what is stored with the models.
func (m *machine) check(t *rapid.T) {
	type row struct {
		Key, State, Code         string
		Fence, Generation        int64
		Attempt                  int
		Past, Gone, Retryable    bool
		Result                   *string
		Fingerprint              []byte
		Orders, Answer, Failures int
	}
	rows, err := m.direct.Query(m.ctx, `SELECT k AS key, coalesce(state, '') AS state, coalesce(fence, 0) AS fence,
			coalesce(generation, 0) AS generation, coalesce(attempt, 0) AS attempt,
			coalesce(expires_at <= statement_timestamp(), false) AS past,
			result_type IS NOT NULL AND (result IS NULL OR coalesce(result_expires_at <= statement_timestamp(), false)) AS gone,
			coalesce(retryable, false) AS retryable, coalesce(error_code, '') AS code, convert_from(result, 'UTF8') AS result, fingerprint,
			(SELECT count(*) FROM orders o WHERE o.key = k) AS orders,
			(SELECT count(*) FROM orders o WHERE o.key = k AND o.id = (convert_from(result, 'UTF8')::json ->> 'id')::bigint) AS answer,
			(SELECT count(*) FROM idempotency.attempts a WHERE a.key = k AND a.event = 'FAILED') AS failures
		FROM unnest($1::text[]) WITH ORDINALITY AS u (k, n) LEFT JOIN idempotency.records r ON r.key = k ORDER BY n`, m.values)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	require.NoError(t, err)
	require.Len(t, all, len(m.keys))
	for i, got := range all {
		key := m.keys[i]
		require.Equal(t, key.successes, got.Orders, "one order per successful generation")
		require.Equal(t, key.failures, got.Failures, "one audit row per recorded failure")
		want := key.record
		if want == nil {
			require.Empty(t, got.State)
			continue
		}
		require.Equal(t, string(want.state), got.State)
		require.Equal(t, want.past, got.Past)
		require.Equal(t, want.gone, got.Gone)
		require.Equal(t, want.retryable, got.Retryable)
		require.GreaterOrEqual(t, got.Fence, key.top, "fences only grow")
		key.top = got.Fence
		require.Equal(t, want.code, got.Code)
		if want.payload < 0 {
			require.Nil(t, got.Fingerprint)
		} else {
			require.Equal(t, key.req[want.payload].Fingerprint.Bytes(), got.Fingerprint)
		}
		if got.Result != nil {
			encoded, err := json.Marshal(want.value)
			require.NoError(t, err)
			require.Equal(t, string(encoded), *got.Result)
			require.Equal(t, want.state == idempotency.StateSuccess, got.Answer == 1, "SUCCESS if and only if its order is there")
		}
	}
}

// The whole state machine of the transactional mode, against the database, by random walks.
func TestStateMachine_RandomWalksFollowTheModel(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	runners := map[pgx.TxIsoLevel]*txn.Runner{}
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	for _, iso := range levels {
		runners[iso] = newRunner(t, s.pool, impatient, isolated(iso))
	}
	var walks atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		iso := rapid.SampledFrom(levels).Draw(rt, "isolation")
		locker, err := s.direct.Acquire(t.Context())
		require.NoError(rt, err)
		m := &machine{ctx: t.Context(), pool: s.pool, direct: s.direct, runner: runners[iso], iso: iso, locker: locker}
		defer func() {
			_, _ = locker.Exec(m.ctx, `SELECT pg_advisory_unlock_all()`)
			locker.Release()
		}()
		walk := walks.Add(1) // fresh keys: the database is shared by all walks
		for i := range 3 {
			value := fmt.Sprintf("w%d-%d", walk, i)
			m.values = append(m.values, value)
			m.keys = append(m.keys, &model{req: [2]idempotency.Request{request(t, value, "one"), request(t, value, "two")}})
		}
		rt.Repeat(map[string]func(*rapid.T){
			"":            m.check,
			"call":        m.call,
			"call again":  m.call, // calls are most of what happens
			"call more":   m.call,
			"drop result": m.dropResult,
			"expire":      m.expire,
			"lock":        m.lock,
			"plant":       m.plant,
			"purge":       m.purge,
			"rescue":      m.rescue,
			"unlock":      m.unlock,
		})
	})
	s.requireIdle(t)
}
