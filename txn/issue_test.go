package txn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/txn"
)

func tokens(t testing.TB, keys ...string) idempotency.Tokens {
	t.Helper()
	var cfg ids.TokensConfig
	for _, id := range keys {
		cfg.Keys = append(cfg.Keys, ids.TokenKey{ID: id, Secret: bytes.Repeat([]byte(id[:1]), 32)})
	}
	made, err := ids.NewTokens(&cfg)
	require.NoError(t, err)
	return made
}

// issuedOnly are two operations that run for issued tokens only.
func issuedOnly(made idempotency.Tokens) []idempotency.Operation {
	return []idempotency.Operation{
		{Name: "order.create", RequireIssued: true, Tokens: made},
		{Name: "order.cancel", RequireIssued: true, Tokens: made, Takeover: idempotency.TakeoverRerun},
	}
}

func newTokenShop(t testing.TB, made idempotency.Tokens, config ...func(*txn.Config)) *shop {
	t.Helper()
	s := newShop(t, append([]func(*txn.Config){func(c *txn.Config) { c.Operations = issuedOnly(made) }}, config...)...)
	t.Cleanup(s.runner.Close)
	return s
}

func (s *shop) issue(t testing.TB, operation string) string {
	t.Helper()
	token, err := txn.Issue(t.Context(), s.runner, idempotency.SingleTenant, operation)
	require.NoError(t, err)
	return token.Key.Value()
}

func (s *shop) rows(t testing.TB) (n int) {
	t.Helper()
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.records`).Scan(&n))
	return n
}

// tokenWays are the entrances that take a token.
var tokenWays = map[string]func(context.Context, testing.TB, *shop, idempotency.Request) error{
	"WithIdempotency": func(ctx context.Context, _ testing.TB, s *shop, req idempotency.Request) error {
		_, err := s.place(ctx, req)
		return err
	},
	"WithIdempotencyMany": func(ctx context.Context, t testing.TB, s *shop, req idempotency.Request) error {
		t.Helper()
		all, err := s.placeMany(ctx, []idempotency.Request{req}, nil)
		if err != nil {
			return err
		}
		return all[0].Err
	},
	"Retry": func(ctx context.Context, _ testing.TB, s *shop, req idempotency.Request) error {
		req.Retry = true
		_, err := s.place(ctx, req)
		return err
	},
	"WithIdempotencyTx": func(ctx context.Context, t testing.TB, s *shop, req idempotency.Request) error {
		t.Helper()
		return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			_, err := txn.WithIdempotencyTx(ctx, s.runner, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				return insertOrder(ctx, tx, req.Key.Value())
			})
			return err
		})
	},
	"Within": func(ctx context.Context, t testing.TB, s *shop, req idempotency.Request) error {
		t.Helper()
		return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			inside := *s
			inside.runner = s.runner.Within(tx)
			defer inside.runner.Close()
			_, err := inside.place(ctx, req)
			return err
		})
	},
	"WithLease": func(ctx context.Context, _ testing.TB, s *shop, req idempotency.Request) error {
		_, err := txn.WithLease(ctx, s.runner, req,
			func(context.Context, *txn.Lease) (int, error) { return 1, nil },
			func(ctx context.Context, tx pgx.Tx, _ int) (order, error) {
				return insertOrder(ctx, tx, req.Key.Value())
			})
		return err
	},
}

func TestIssue_ATokenHasOneEffect(t *testing.T) {
	t.Parallel()
	for way, use := range tokenWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newTokenShop(t, tokens(t))
			token, err := txn.Issue(t.Context(), s.runner, idempotency.SingleTenant, "order.create")
			require.NoError(t, err)
			req := request(t, token.Key.Value(), "body")
			r, found := s.record(t, req)
			require.True(t, found)
			require.Equal(t, idempotency.StateInit, r.State)
			require.Equal(t, 24*time.Hour, r.ExpiresAt.Sub(r.CreatedAt))
			require.Equal(t, r.ExpiresAt, token.ExpiresAt)

			for range 3 {
				require.NoError(t, use(t.Context(), t, s, req))
			}
			require.ErrorIs(t, use(t.Context(), t, s, request(t, token.Key.Value(), "another body")), idempotency.ErrMismatch)
			require.Equal(t, 1, s.orders(t, token.Key.Value()))
			r, _ = s.record(t, req)
			require.Equal(t, idempotency.StateSuccess, r.State)
			require.Equal(t, 1, r.Attempt)
			require.Positive(t, r.Fence)
			require.Equal(t, idempotency.DefaultRetention, r.ExpiresAt.Sub(r.CompletedAt), "an outcome is kept as ever")
		})
	}
}

func TestRequireIssued_RefusesWhatWasNotIssued(t *testing.T) {
	t.Parallel()
	for way, use := range tokenWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			made := tokens(t)
			s := newTokenShop(t, made)
			refused := func(value string) {
				t.Helper()
				require.ErrorIs(t, use(t.Context(), t, s, request(t, value, "body")), idempotency.ErrNotIssued)
				require.Zero(t, s.orders(t, value))
			}
			refused("a client's own key")
			refused(made.Make(idempotency.SingleTenant, "order.create")) // never recorded
			require.Zero(t, s.rows(t))

			refused(s.issue(t, "order.cancel"))
			ofAnother, err := txn.Issue(t.Context(), s.runner, "acme", "order.create")
			require.NoError(t, err)
			refused(ofAnother.Key.Value())

			late := s.issue(t, "order.create")
			s.exec(t, `UPDATE idempotency.records SET expires_at = statement_timestamp() WHERE key = $1`, late)
			refused(late)

			used := s.issue(t, "order.create")
			require.NoError(t, use(t.Context(), t, s, request(t, used, "body")))
			s.exec(t, `UPDATE idempotency.records SET expires_at = statement_timestamp() WHERE key = $1`, used)
			require.ErrorIs(t, use(t.Context(), t, s, request(t, used, "body")), idempotency.ErrNotIssued, "its outcome is forgotten, and it with it")
			require.Equal(t, 1, s.orders(t, used))
		})
	}
}

// Not required, tokens and clients' own keys work side by side: so an operation can get used to tokens.
func TestIssue_WithoutRequireIssued(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: "order.create", Tokens: tokens(t, "a"), TokenLife: time.Minute}}
	})
	token, err := txn.Issue(t.Context(), s.runner, idempotency.SingleTenant, "order.create")
	require.NoError(t, err)
	for _, value := range []string{token.Key.Value(), "a client's own key"} {
		_, err := s.place(t.Context(), request(t, value, "body"))
		require.NoError(t, err)
	}
}

// A token whose time ends while its function runs is used: it was good when the function began. Also when the purge has taken
// its record away meanwhile, and when the transaction must run again.
func TestRequireIssued_TimeEndsWhileTheFunctionRuns(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"Expired": `UPDATE idempotency.records SET expires_at = statement_timestamp()`,
		"Purged":  `DELETE FROM idempotency.records`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTokenShop(t, tokens(t))
			req := request(t, s.issue(t, "order.create"), "body")
			runs := 0
			got, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				if runs++; runs == 1 {
					_, err := s.direct.Exec(ctx, sql) // past the transaction
					require.NoError(t, err)
					return order{}, fmt.Errorf("%w: once more", idempotency.ErrRestart)
				}
				return insertOrder(ctx, tx, req.Key.Value())
			})
			require.NoError(t, err)
			require.False(t, got.Replayed)
			require.Equal(t, 2, runs)
			require.Equal(t, 1, s.orders(t, req.Key.Value()))
			again, err := s.place(t.Context(), req)
			require.NoError(t, err)
			require.True(t, again.Replayed)
		})
	}
}

// Two processes get one token at the same time, and each wants something else of it.
func TestIssue_RaceOfTwoUsers(t *testing.T) {
	t.Parallel()
	s := newTokenShop(t, tokens(t, "a"))
	second := *s
	second.runner = newRunner(t, s.pool, func(c *txn.Config) { c.Operations = issuedOnly(tokens(t, "a")) })
	t.Cleanup(second.runner.Close)
	for range 30 {
		value := s.issue(t, "order.create")
		var group sync.WaitGroup
		errs := make([]error, 2)
		start := make(chan struct{})
		for i, user := range []*shop{s, &second} {
			group.Go(func() {
				<-start
				_, errs[i] = user.place(t.Context(), request(t, value, fmt.Sprint("body ", i)))
			})
		}
		close(start)
		group.Wait()
		winner, loser := errs[0], errs[1]
		if winner != nil {
			winner, loser = loser, winner
		}
		require.NoError(t, winner)
		require.ErrorIs(t, loser, idempotency.ErrMismatch)
		require.Equal(t, 1, s.orders(t, value))
	}
}

// countingConn counts what is sent to PostgreSQL.
type countingConn struct {
	net.Conn
	sent *atomic.Int64
}

func (c countingConn) Write(b []byte) (int, error) {
	c.sent.Add(1)
	return c.Conn.Write(b)
}

func TestIssue_ForgedTokensCostNoStatement(t *testing.T) {
	t.Parallel()
	var dialed, sent atomic.Int64
	made := tokens(t, "a")
	s := newShopWith(t, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			dialed.Add(1)
			return countingConn{conn, &sent}, err
		}
		c.HealthCheckPeriod = time.Hour
	}, func(c *txn.Config) { c.Operations = issuedOnly(made) })
	t.Cleanup(s.runner.Close)

	good := made.Make(idempotency.SingleTenant, "order.create")
	forged := []string{
		"a client's own key", strings.Repeat("0", 26), good[:26], // not signed
		good[:len(good)-2] + "AA",
		tokens(t, "b").Make(idempotency.SingleTenant, "order.create"),
		strings.Replace(tokens(t, "b").Make(idempotency.SingleTenant, "order.create"), ".b.", ".a.", 1),
		made.Make("acme", "order.create"), made.Make(idempotency.SingleTenant, "order.cancel"),
	}
	try := func() {
		t.Helper()
		for _, value := range forged {
			req := request(t, value, "body")
			_, err := s.place(t.Context(), req)
			require.ErrorIs(t, err, idempotency.ErrNotIssued, value)
			var token *ids.TokenError
			require.ErrorAs(t, err, &token, value)
			_, err = txn.WithLease(t.Context(), s.runner, req,
				func(context.Context, *txn.Lease) (int, error) { return 0, errors.New("called") },
				func(context.Context, pgx.Tx, int) (int, error) { return 0, errors.New("called") })
			require.ErrorAs(t, err, &token, value)
		}
	}
	try()
	require.Zero(t, dialed.Load(), "not even a connection was made")

	_, err := s.place(t.Context(), request(t, good, "body"))
	require.ErrorIs(t, err, idempotency.ErrNotIssued, "signed, and yet never recorded")
	_, err = s.place(t.Context(), request(t, s.issue(t, "order.create"), "body"))
	require.NoError(t, err)
	before := sent.Load()
	require.Positive(t, before, "the count counts")
	try()
	require.Equal(t, before, sent.Load(), "nothing was sent")

	// In a transaction of the caller too.
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		before := sent.Load()
		for _, value := range forged {
			_, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, value, "body"), func(context.Context, pgx.Tx) (int, error) { return 0, nil })
			require.ErrorIs(t, err, idempotency.ErrNotIssued)
		}
		require.Equal(t, before, sent.Load())
		return nil
	}))
}

// A token issued before the keys were turned works after it, as long as its key is known.
func TestIssue_KeysAreRotated(t *testing.T) {
	t.Parallel()
	s := newTokenShop(t, tokens(t, "a"))
	with := func(keys ...string) *shop {
		other := *s
		other.runner = newRunner(t, s.pool, func(c *txn.Config) { c.Operations = issuedOnly(tokens(t, keys...)) })
		t.Cleanup(other.runner.Close)
		return &other
	}
	turned, after := with("b", "a"), with("b")
	use := func(user *shop, value string) error {
		_, err := user.place(t.Context(), request(t, value, "body"))
		return err
	}
	old, second := s.issue(t, "order.create"), s.issue(t, "order.create")
	require.NoError(t, use(turned, old))
	require.ErrorIs(t, use(after, second), idempotency.ErrNotIssued)
	young := turned.issue(t, "order.create")
	require.NoError(t, use(after, young))
	require.ErrorIs(t, use(s, young), idempotency.ErrNotIssued)
}

func TestIssue_Refused(t *testing.T) {
	t.Parallel()
	var refused atomic.Int64
	s := newTokenShop(t, tokens(t), func(c *txn.Config) {
		c.Operations = append(c.Operations, idempotency.Operation{Name: "no.tokens", RequireIssued: true})
		c.OnEvent = func(_ context.Context, e idempotency.Event) {
			if r, is := e.(idempotency.Refused); is && errors.Is(r.Err, idempotency.ErrNotIssued) {
				refused.Add(1)
			}
		}
	})
	for _, operation := range []string{"unknown", "no.tokens"} {
		_, err := txn.Issue(t.Context(), s.runner, idempotency.SingleTenant, operation)
		require.ErrorIs(t, err, idempotency.ErrConfig, operation)
	}
	_, err := txn.Issue(t.Context(), s.runner, "", "order.create")
	require.ErrorIs(t, err, idempotency.ErrInvalid)
	require.Zero(t, s.rows(t))

	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, s.issue(t, "order.create"), "body"), func(ctx context.Context, _ pgx.Tx) (int, error) {
		_, err := txn.Issue(ctx, s.runner, idempotency.SingleTenant, "order.create")
		return 0, err
	})
	require.ErrorIs(t, err, idempotency.ErrNested)

	_, err = s.place(t.Context(), request(t, tokens(t).Make(idempotency.SingleTenant, "order.create"), "body"))
	require.ErrorIs(t, err, idempotency.ErrNotIssued)
	require.EqualValues(t, 1, refused.Load())
}

func BenchmarkIssue(b *testing.B) {
	s := newTokenShop(b, tokens(b, "a"))
	for b.Loop() {
		if _, err := txn.Issue(b.Context(), s.runner, idempotency.SingleTenant, "order.create"); err != nil {
			b.Fatal(err)
		}
	}
}
