//go:build failpoints

package faultsuite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/failpoint"
	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

// kind is what a key's client asks for; a round has all of them.
type kind int

const (
	plain    kind = iota
	refused       // the function returns a Final: its rows are rolled back, the failure is recorded
	joined        // in a transaction of the service
	flawed        // the first call's function fails, the second's does not
	repeated      // two calls
	kinds
)

type killArgs struct {
	URL    string
	Prefix string
}

// killFact is told before a call, with Done false, and after it.
type killFact struct {
	Kind kind
	Done bool
	Told invariant.Told
}

// enough bounds a child that no trap ends.
const enough = 5000

// shopping places orders of all kinds, four at a time, until the process is killed.
var shopping = childtest.Register("shopping", func(ctx context.Context, a killArgs, tell func(killFact)) error {
	pool, err := connect(ctx, a.URL, options{})
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	if err != nil {
		return err
	}
	errs := make([]error, 4)
	var clients sync.WaitGroup
	for g := range errs {
		clients.Go(func() {
			for i := 0; i < enough && errs[g] == nil; i++ {
				errs[g] = shopOnce(ctx, pool, r, kind(i)%kinds, fmt.Sprintf("%s%d-%d", a.Prefix, g, i), tell)
			}
		})
	}
	clients.Wait()
	return errors.Join(errs...)
})

func shopOnce(ctx context.Context, pool *pgxpool.Pool, r *txn.Runner, k kind, key string, tell func(killFact)) error {
	calls := 1
	if k == flawed || k == repeated {
		calls = 2
	}
	for call := range calls {
		tell(killFact{Kind: k, Told: invariant.Told{Tenant: idempotency.SingleTenant, Key: key, Outcome: invariant.Unknown}})
		var res txn.Result[order]
		var err error
		if k == joined {
			res, err = joinOrder(ctx, pool, r, key)
		} else {
			res, err = askFor(ctx, r, k, key, call == 0)
		}
		told, known := verdict(key, res, err)
		if errors.Is(err, errFlaw) {
			told.Outcome, known = invariant.NotDone, true
		}
		if !known {
			return fmt.Errorf("%s: %w", key, err)
		}
		tell(killFact{Kind: k, Done: true, Told: told})
	}
	return nil
}

var (
	errFlaw  = errors.New("a flaw of the first call")
	errStock = errors.New("out of stock")
)

func askFor(ctx context.Context, r *txn.Runner, k kind, key string, first bool) (txn.Result[order], error) {
	req, err := request(key)
	if err != nil {
		return txn.Result[order]{}, err
	}
	return txn.WithIdempotency(ctx, r, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, key)
		switch {
		case err != nil:
		case k == refused:
			err = txn.Final("out_of_stock", errStock)
		case k == flawed && first:
			err = errFlaw
		}
		return o, err
	})
}

func joinOrder(ctx context.Context, pool *pgxpool.Pool, r *txn.Runner, key string) (res txn.Result[order], err error) {
	req, err := request(key)
	if err != nil {
		return res, err
	}
	var j *txn.Joined[order]
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		j, err = txn.WithIdempotencyTx(ctx, r, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			return insertOrder(ctx, tx, key)
		})
		return err
	})
	if err != nil {
		return res, err
	}
	err = j.AfterCommit(ctx)
	return j.Result, err
}

// A process dies at every point of the code. What it had acknowledged is there, and what it had begun happens once.
func TestFault_ProcessKilledAtEveryPoint(t *testing.T) {
	t.Parallel()
	total := &tally{}
	t.Cleanup(func() { t.Logf("faults: killed processes: points %d, %v", len(failpoint.All()), total) }) // when the parallel ones are done
	for _, at := range failpoint.All() {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			killAt(t, total, at)
		})
	}
}

func killAt(t *testing.T, total *tally, at failpoint.Point) {
	t.Helper()
	s := newShop(t, options{})
	other := s.another(t)
	if at == failpoint.ResolveBefore || at == failpoint.ResolveAfter {
		s.proxy.Decide(func(c pgproxy.Commit) pgproxy.Rule {
			if c.Simple || rand.IntN(3) > 0 {
				return pgproxy.Rule{}
			}
			return pgproxy.Rule{Do: []pgproxy.Action{pgproxy.CutBefore, pgproxy.CutAfter}[rand.IntN(2)]}
		})
	}
	url := s.proxy.URL(s.direct.Config().ConnString())
	before, err := invariant.Take(t.Context(), s.direct, create.Name)
	require.NoError(t, err)
	useful := 0
	rounds := scaled(2, 20)
	for round := range rounds {
		hit := 1 + rand.IntN(scaled(12, 30))
		child := shopping.Start(t, killArgs{URL: url, Prefix: fmt.Sprintf("r%d-", round)},
			failpoint.Env(failpoint.Trap{At: at, Do: failpoint.Kill, Hit: hit}))
		require.ErrorIs(t, child.Wait(t), childtest.ErrKilled, "hit %d", hit)

		begun := map[string]kind{}
		for _, f := range child.Facts() {
			s.tell(f.Told)
			begun[f.Told.Key] = f.Kind
		}
		require.NotEmpty(t, begun)
		for key, k := range begun {
			s.settle(t, other, k, key)
			if k != refused {
				useful++
			}
		}
		before = s.check(t, &tally{}, useful, before)
	}
	total.add(func() { total.kills, total.cuts = total.kills+rounds, total.cuts+int(s.proxy.Stats().Cut) })
	s.check(t, total, max(useful, 1), before)
}

// settle retries as the killed client's caller does, until there is an answer that counts.
func (s *shop) settle(t *testing.T, r *txn.Runner, k kind, key string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		res, err := askFor(t.Context(), r, k, key, false)
		told, known := verdict(key, res, err)
		require.True(t, known, "%s: %v", key, err)
		s.tell(told)
		if told.Outcome == invariant.Succeeded || told.Outcome == invariant.Failed {
			require.Equal(t, k == refused, told.Outcome == invariant.Failed, "%s: %v", key, err)
			return
		}
		require.True(t, time.Now().Before(deadline), "%s: %v", key, err)
	}
}
