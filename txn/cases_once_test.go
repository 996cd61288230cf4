package txn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// scaled is how much of a long test one run does: a tenth with -short, and more than usual where the environment variable
// PGONCE_SOAK (any value) asks for it.
func scaled(t testing.TB, usual, soak int) int {
	t.Helper()
	switch {
	case os.Getenv("PGONCE_SOAK") != "":
		return soak
	case testing.Short():
		return usual / 10
	}
	return usual
}

// storm is many callers of few keys: every key is tried tries times, spread over goroutines.
type storm struct{ goroutines, keys, tries int }

// run makes the calls and writes down every answer. Calls that are told "in progress" are made again.
func (st storm) run(ctx context.Context, s *shop, who string) error {
	type said struct {
		key      string
		order    int64
		replayed bool
	}
	var mu sync.Mutex
	var answers [][]any
	// All go through the keys in nearly the same order, so that they meet.
	calls := make(chan int)
	go func() {
		defer close(calls)
		for from := 0; from < st.keys; from += 50 {
			var block []int
			for k := from; k < min(from+50, st.keys); k++ {
				for range st.tries {
					block = append(block, k)
				}
			}
			rand.Shuffle(len(block), func(i, j int) { block[i], block[j] = block[j], block[i] })
			for _, k := range block {
				calls <- k
			}
		}
	}()
	call := func(k int) (said, error) {
		value := fmt.Sprintf("k%d", k)
		key, err := create.Key(idempotency.SingleTenant, value)
		if err != nil {
			return said{}, err
		}
		req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(value))}
		for {
			res, err := txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				return insertOrder(ctx, tx, value)
			})
			if errors.Is(err, idempotency.ErrInProgress) {
				continue
			}
			return said{value, res.Value.ID, res.Replayed}, err
		}
	}
	errs := make([]error, st.goroutines)
	var wg sync.WaitGroup
	for g := range st.goroutines {
		wg.Go(func() {
			for k := range calls {
				a, err := call(k)
				mu.Lock()
				answers = append(answers, []any{who, a.key, a.order, a.replayed})
				mu.Unlock()
				errs[g] = errors.Join(errs[g], err)
			}
		})
	}
	wg.Wait()
	_, err := s.pool.CopyFrom(ctx, pgx.Identifier{"answers"}, []string{"who", "key", "order_id", "replayed"}, pgx.CopyFromRows(answers))
	return errors.Join(append(errs, err)...)
}

// newStorm makes the shop with a table for answers.
func newStorm(t testing.TB) *shop {
	t.Helper()
	s := newShop(t)
	s.exec(t, `CREATE TABLE answers (who text, key text, order_id bigint, replayed bool)`)
	return s
}

// requireOnce checks after a storm that every key was served once, and that everybody got that one's answer.
func (s *shop) requireOnce(t testing.TB, keys, answers int) {
	t.Helper()
	for name, c := range map[string]struct {
		sql  string
		want int
	}{
		"orders":                   {`SELECT count(*) FROM orders`, keys},
		"keys with an order":       {`SELECT count(DISTINCT key) FROM orders`, keys},
		"answers":                  {`SELECT count(*) FROM answers`, answers},
		"fresh answers":            {`SELECT count(*) FROM answers WHERE NOT replayed`, keys},
		"answers of another order": {`SELECT count(*) FROM answers a LEFT JOIN orders o ON (o.id, o.key) = (a.order_id, a.key) WHERE o.id IS NULL`, 0},
		"records": {`SELECT count(*) FROM idempotency.records r JOIN orders o USING (key)
			WHERE r.state = 'SUCCESS' AND r.attempt = 1 AND (convert_from(r.result, 'UTF8')::json ->> 'id')::bigint = o.id`, keys},
		"records without an order": {`SELECT count(*) FROM idempotency.records r LEFT JOIN orders o USING (key) WHERE o.key IS NULL`, 0},
		"fences":                   {`SELECT count(DISTINCT fence) FROM idempotency.records`, keys},
	} {
		var n int
		require.NoError(t, s.direct.QueryRow(t.Context(), c.sql).Scan(&n))
		require.Equal(t, c.want, n, name)
	}
}

// Promise D1, in one process: four runners, so that calls of one key also meet in PostgreSQL.
func TestOneEffectPerKey_ManyGoroutines(t *testing.T) {
	t.Parallel()
	const replicas, keys, tries = 4, 100, 4
	s := newStorm(t)
	errs := make(chan error, replicas)
	for i := range replicas {
		r := s.replica(t)
		go func() {
			errs <- storm{goroutines: 2, keys: keys, tries: tries / replicas}.run(t.Context(), r, strconv.Itoa(i))
		}()
	}
	for range replicas {
		require.NoError(t, <-errs)
	}
	s.requireOnce(t, keys, keys*tries)
}

// The child processes of the next test get these.
const (
	stormURL  = "PGONCE_TEST_STORM_URL"
	stormKeys = "PGONCE_TEST_STORM_KEYS"
)

// Promise D1: 4 processes, 16 goroutines each, every key tried 8 times.
func TestOneEffectPerKey_ManyProcesses(t *testing.T) {
	t.Parallel()
	const processes, goroutines, tries = 4, 16, 8
	if url := os.Getenv(stormURL); url != "" {
		keys, err := strconv.Atoi(os.Getenv(stormKeys))
		require.NoError(t, err)
		cfg, err := pgxpool.ParseConfig(url)
		require.NoError(t, err)
		txn.ConfigurePool(cfg)
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		require.NoError(t, err)
		defer pool.Close()
		s := &shop{pool: pool, runner: newRunner(t, pool)}
		_, err = pool.Exec(t.Context(), `INSERT INTO started VALUES (0)`)
		require.NoError(t, err)
		require.Eventually(t, func() bool { // all begin together
			var n int
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM started`).Scan(&n)
			return err == nil && n == processes
		}, patience, 5*time.Millisecond)
		st := storm{goroutines: goroutines, keys: keys, tries: tries / processes}
		require.NoError(t, st.run(t.Context(), s, strconv.Itoa(os.Getpid())))
		return
	}
	keys := scaled(t, 2000, 20_000)
	s := newStorm(t)
	s.exec(t, `CREATE TABLE started (n int)`)
	began := time.Now()
	var wg sync.WaitGroup
	output, errs := make([]bytes.Buffer, processes), make([]error, processes)
	for i := range processes {
		wg.Go(func() {
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOneEffectPerKey_ManyProcesses$", "-test.count=1")
			child.Env = append(os.Environ(),
				stormURL+"="+s.pool.Config().ConnString(), stormKeys+"="+strconv.Itoa(keys))
			child.Stdout, child.Stderr = &output[i], &output[i]
			errs[i] = child.Run()
		})
	}
	wg.Wait()
	for i := range processes {
		require.NoError(t, errs[i], output[i].String())
	}
	s.requireOnce(t, keys, keys*tries)
	var busiest int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(DISTINCT who) FROM answers WHERE NOT replayed`).Scan(&busiest))
	require.Greater(t, busiest, 1, "one process did all the work: the others came too late to race")
	t.Logf("%d calls of %d keys in %v", keys*tries, keys, time.Since(began).Round(time.Millisecond))
}
