package faultsuite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// payments is a leased operation with the shortest lease there is.
var payments = idempotency.Operation{Name: "payment.capture", Takeover: idempotency.TakeoverRerun, Lease: time.Second, Wait: 10 * time.Second}

// paymentTables are the service's and the provider's; the provider does nothing twice for one key of its own.
const paymentTables = `
	CREATE TABLE paid (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, charge text NOT NULL, by text NOT NULL);
	CREATE TABLE charges (downstream_key text PRIMARY KEY, key text NOT NULL)`

type payArgs struct {
	URL    string
	Prefix string
	Owners int
}

// payFact is told when the provider was asked, and with the end of the call.
type payFact struct {
	Key   string
	Asked bool
	Paid  bool
	Lost  bool
}

func payingRunner(ctx context.Context, url string, op idempotency.Operation) (*txn.Runner, *pgxpool.Pool, error) {
	pool, err := connect(ctx, url, options{})
	if err != nil {
		return nil, nil, err
	}
	r, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{op}})
	return r, pool, err
}

// payOnce pays by key. asked is called while the provider has charged and nothing is recorded yet.
func payOnce(ctx context.Context, r *txn.Runner, pool *pgxpool.Pool, key, by string, asked func()) (txn.Result[string], error) {
	k, err := payments.Key(idempotency.SingleTenant, key)
	if err != nil {
		return txn.Result[string]{}, err
	}
	req := idempotency.Request{Key: k, Fingerprint: idempotency.FingerprintBytes([]byte(key))}
	return txn.WithLease(ctx, r, req, func(ctx context.Context, l *txn.Lease) (string, error) {
		charge := l.DownstreamKey("charge")
		_, err := pool.Exec(ctx, `INSERT INTO charges (downstream_key, key) VALUES ($1, $2) ON CONFLICT DO NOTHING`, charge, key)
		if err == nil {
			asked()
		}
		return charge, err
	}, func(ctx context.Context, tx pgx.Tx, charge string) (string, error) {
		_, err := tx.Exec(ctx, `INSERT INTO paid (key, charge, by) VALUES ($1, $2, $3)`, key, charge, by)
		return charge, err
	})
}

// owners hold leases until they are stopped, and try to go on afterwards as if nothing had happened.
var owners = childtest.Register("owners", func(ctx context.Context, a payArgs, tell func(payFact)) error {
	r, pool, err := payingRunner(ctx, a.URL, payments)
	if err != nil {
		return err
	}
	defer pool.Close()
	defer r.Close()
	errs := make([]error, a.Owners)
	var all sync.WaitGroup
	for i := range errs {
		key := fmt.Sprint(a.Prefix, i)
		all.Go(func() {
			_, err := payOnce(ctx, r, pool, key, "stopped", func() {
				tell(payFact{Key: key, Asked: true})
				// The parent stops the process from here on, and somebody else pays. As soon as the process goes on it commits,
				// before any renewal can tell it the truth.
				for paid := false; !paid; {
					if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM paid WHERE key = $1)`, key).Scan(&paid); err != nil {
						return
					}
				}
			})
			lost := errors.Is(err, idempotency.ErrLeaseLost)
			tell(payFact{Key: key, Paid: err == nil, Lost: lost})
			if !lost {
				errs[i] = err
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
})

// W05: a process that was stopped for longer than its lease comes back when somebody else has done the work.
func TestCase_W05_StoppedOwnersCommitNothing(t *testing.T) {
	t.Parallel()
	const perRound = 10
	rounds := scaled(2, 20)
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), paymentTables)
	require.NoError(t, err)
	url := pgtest.ServiceURL(t, direct.Config().ConnString())
	r, pool, err := payingRunner(t.Context(), url, payments)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	t.Cleanup(r.Close)
	lost := 0
	for round := range rounds {
		prefix := fmt.Sprintf("r%d-", round)
		child := owners.Start(t, payArgs{URL: url, Prefix: prefix, Owners: perRound})
		for i := range perRound {
			child.Await(t, func(f payFact) bool { return f.Asked && f.Key == fmt.Sprint(prefix, i) })
		}
		child.Stop(t)
		child.AwaitStopped(t)
		// Its lease is renewed no more: the next owner waits for its end, and takes over.
		var all sync.WaitGroup
		for i := range perRound {
			all.Go(func() {
				key := fmt.Sprint(prefix, i)
				if _, err := payOnce(t.Context(), r, pool, key, "next", func() {}); err != nil {
					t.Error(key, err)
				}
			})
		}
		all.Wait()
		child.Continue(t)
		require.NoError(t, child.Wait(t))
		for _, f := range child.Facts() {
			require.False(t, f.Paid, "%s: the old owner says that it has paid", f.Key)
			if f.Lost {
				lost++
			}
		}
	}
	require.Equal(t, rounds*perRound, lost)
	var paid, byStopped, charges int
	require.NoError(t, direct.QueryRow(t.Context(), `SELECT count(DISTINCT key), count(*) FILTER (WHERE by <> 'next') FROM paid`).Scan(&paid, &byStopped))
	require.NoError(t, direct.QueryRow(t.Context(), `SELECT count(*) FROM charges`).Scan(&charges))
	require.Equal(t, rounds*perRound, paid)
	require.Equal(t, rounds*perRound, charges)
	require.Zero(t, byStopped)
	t.Logf("faults: owners stopped past their lease: %d, committed by them: %d, charges: %d for %d payments", lost, byStopped, charges, paid)
}

// payers pay by keys of their own, four at a time, until the process is killed.
var payers = childtest.Register("payers", func(ctx context.Context, a payArgs, tell func(payFact)) error {
	op := payments
	op.Takeover, op.Resolver = idempotency.TakeoverResolve, provider{}
	r, pool, err := payingRunner(ctx, a.URL, op)
	if err != nil {
		return err
	}
	defer pool.Close()
	defer r.Close()
	errs := make([]error, 4)
	var all sync.WaitGroup
	for g := range errs {
		all.Go(func() {
			for i := 0; errs[g] == nil; i++ {
				key := fmt.Sprintf("%s%d-%d", a.Prefix, g, i)
				tell(payFact{Key: key})
				_, err := payOnce(ctx, r, pool, key, "killed", func() {})
				if errs[g] = err; err == nil {
					tell(payFact{Key: key, Paid: true})
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
})

// provider is asked what became of a payment.
type provider struct{ pool *pgxpool.Pool }

func (p provider) Ask(ctx context.Context, r idempotency.Record, _ []idempotency.Step) (found idempotency.Resolution, err error) {
	var charged bool
	charge := r.DownstreamKey("charge")
	if err := p.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM charges WHERE downstream_key = $1)`, charge).Scan(&charged); err != nil {
		return found, err
	}
	if !charged {
		// The process is dead, and so is its connection: its charge cannot come any more.
		return idempotency.Resolution{Outcome: idempotency.OutcomeFailed, Code: "not_charged", Message: "nothing was charged"}, nil
	}
	found = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1"}
	found.Result, err = json.Marshal(charge)
	return found, err
}

func (provider) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, found idempotency.Resolution) error {
	if found.Outcome != idempotency.OutcomeSucceeded {
		return nil
	}
	_, err := tx.Exec(ctx, `INSERT INTO paid (key, charge, by) VALUES ($1, $2, 'compensator')`, r.Key.Value(), r.DownstreamKey("charge"))
	return err
}

// Processes that pay are killed at any moment. Nobody comes back for their payments but the compensator.
func TestFault_KilledPaymentsAreFinished(t *testing.T) {
	t.Parallel()
	rounds := scaled(5, 100)
	direct := pgtest.Pool(t, txn.ConfigurePool)
	_, err := direct.Exec(t.Context(), paymentTables)
	require.NoError(t, err)
	url := pgtest.ServiceURL(t, direct.Config().ConnString())
	count := func(sql string) (n int) {
		t.Helper()
		require.NoError(t, direct.QueryRow(t.Context(), sql).Scan(&n))
		return n
	}
	op := payments
	op.Takeover, op.Resolver = idempotency.TakeoverResolve, provider{pool: direct}
	c, err := compensator.New(direct, &compensator.Config{Operations: []idempotency.Operation{op}})
	require.NoError(t, err)
	acknowledged, orphans := map[string]bool{}, 0
	for round := range rounds {
		child := payers.Start(t, payArgs{URL: url, Prefix: fmt.Sprintf("r%d-", round)})
		child.Await(t, func(f payFact) bool { return f.Paid })
		time.Sleep(time.Duration(rand.Int64N(int64(100 * time.Millisecond))))
		child.Kill(t)
		for _, f := range child.Facts() {
			if f.Paid {
				acknowledged[f.Key] = true
			}
		}
		// Later than the lease of the last one. Rounds share the wait: only at the end everything must be finished.
		if round%10 == 9 || round == rounds-1 {
			awaitGone(t, direct)
			require.Eventually(t, func() bool {
				return count(`SELECT count(*) FROM idempotency.records WHERE state = 'PROCESSING' AND lease_expires_at > statement_timestamp()`) == 0
			}, 10*time.Second, 20*time.Millisecond)
			orphans += count(`SELECT count(*) FROM idempotency.records WHERE state = 'PROCESSING'`)
			_, err := c.RunOnce(t.Context())
			require.NoError(t, err)
			require.Zero(t, count(`SELECT count(*) FROM idempotency.records WHERE state = 'PROCESSING'`), "one pass behind the lease's end")
		}
	}
	require.Zero(t, count(`SELECT count(*) - count(DISTINCT key) FROM charges`), "charged twice")
	require.Zero(t, count(`SELECT count(*) - count(DISTINCT key) FROM paid`), "booked twice")
	require.Zero(t, count(`SELECT count(*) FROM charges AS c FULL JOIN paid AS p ON p.key = c.key AND p.charge = c.downstream_key
		WHERE p.key IS NULL OR c.key IS NULL`), "charged and not booked, or booked and not charged")
	require.Zero(t, count(`SELECT count(*) FROM idempotency.records AS r LEFT JOIN paid AS p ON p.key = r.key
		WHERE (r.state = 'SUCCESS') <> (p.key IS NOT NULL)`), "SUCCESS if and only if it is booked")
	lost := 0
	for key := range acknowledged {
		if count(`SELECT count(*) FROM paid WHERE key = '`+key+`'`) != 1 {
			lost++
		}
	}
	require.Zero(t, lost)
	require.Positive(t, orphans)
	t.Logf("faults: paying processes killed: %d, payments acknowledged: %d, left unfinished and finished by the compensator: %d, charged twice: 0, lost: 0",
		rounds, len(acknowledged), orphans)
}
