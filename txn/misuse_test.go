package txn_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// What a function may do besides its work, and what comes of it: docs/misuse.md.

// ways are both ways of calling a function: each calls it until its outcome is committed, or fails.
var ways = map[string]func(ctx context.Context, s *shop, req idempotency.Request, fn func(context.Context, pgx.Tx) (order, error)) (txn.Result[order], error){
	"WithIdempotency": func(ctx context.Context, s *shop, req idempotency.Request, fn func(context.Context, pgx.Tx) (order, error)) (txn.Result[order], error) {
		return txn.WithIdempotency(ctx, s.runner, req, fn)
	},
	"WithIdempotencyTx": func(ctx context.Context, s *shop, req idempotency.Request, fn func(context.Context, pgx.Tx) (order, error)) (txn.Result[order], error) {
		tx, err := s.pool.Begin(ctx)
		if err != nil {
			return txn.Result[order]{}, err
		}
		joined, err := txn.WithIdempotencyTx(ctx, s.runner, tx, req, fn)
		if err != nil {
			err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx)))
			return txn.Result[order]{}, err
		}
		if err := tx.Commit(ctx); err != nil {
			return txn.Result[order]{}, err
		}
		return joined.Result, joined.AfterCommit(ctx)
	},
}

// doing places an order and does something more, in this order or, where the order would fail afterwards, the other.
func doing(key string, more func(ctx context.Context, tx pgx.Tx) error) func(context.Context, pgx.Tx) (order, error) {
	return func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, key)
		return o, errors.Join(err, more(ctx, tx))
	}
}

// statements is a function's misuse by SQL.
func statements(all ...string) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		for _, sql := range all {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	}
}

// requireSound requires that there is one order and its record, or neither and a key that is free.
func (s *shop) requireSound(t *testing.T, req idempotency.Request, succeeded bool) {
	t.Helper()
	if !succeeded {
		s.requireNoRecord(t, req)
	}
	res, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, succeeded, res.Replayed)
	require.Equal(t, 1, s.orders(t, req.Key.Value()))
	r, found := s.record(t, req)
	require.True(t, found)
	require.Equal(t, idempotency.StateSuccess, r.State)
	s.requireIdle(t)
}

// A success: what the function left behind ends with its transaction, or is its session's own.
func TestMisuse_LeftBehind(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string][]string{
		"temporary table":            {`CREATE TEMP TABLE records (n int) ON COMMIT DROP`},
		"temporary table that lasts": {`CREATE TEMP TABLE IF NOT EXISTS records (n int)`},
		"open cursor":                {`DECLARE c CURSOR FOR SELECT generate_series(1, 100000)`, `FETCH 1 FROM c`},
		"cursor that lasts":          {`DECLARE c CURSOR WITH HOLD FOR SELECT 1`},
		"open savepoint":             {`SAVEPOINT own`},
		"notification":               {`LISTEN orders`, `NOTIFY orders, 'placed'`},
		"no idle timeout":            {`SET LOCAL idle_in_transaction_session_timeout = 0`},
		"constraints deferred":       {`SET CONSTRAINTS ALL DEFERRED`},
		"constraints immediate":      {`SET CONSTRAINTS ALL IMMEDIATE`},
		"hostile time zone":          {`SET LOCAL timezone = 'Asia/Kathmandu'`, `SET LOCAL datestyle = 'German'`},
		"hostile formats":            {`SET LOCAL bytea_output = 'escape'`, `SET LOCAL standard_conforming_strings = off`, `SET LOCAL intervalstyle = 'iso_8601'`},
	} {
		for way, call := range ways {
			t.Run(name+"/"+way, func(t *testing.T) {
				t.Parallel()
				s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
				req := request(t, "k", "body")
				_, err := call(t.Context(), s, req, doing("k", statements(sql...)))
				require.NoError(t, err)
				s.requireSound(t, req, true)
				// The next one on the same connection.
				_, err = s.pool.Exec(t.Context(), `CLOSE ALL`)
				require.NoError(t, err)
				_, err = call(t.Context(), s, request(t, "k2", "body"), doing("k2", statements(sql...)))
				require.NoError(t, err)
				s.requireSound(t, request(t, "k2", "body"), true)
			})
		}
	}
}

// A definite error, and nothing is stored: the function took away what completion needs.
func TestMisuse_CompletionRefused(t *testing.T) {
	t.Parallel()
	// A rival's record of the same key, not committed: completion waits for it, as for nothing else.
	rival := func(t *testing.T, s *shop, req idempotency.Request) {
		t.Helper()
		tx, err := s.direct.Begin(t.Context()) // the service's pool may have one connection
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
		_, err = tx.Exec(t.Context(), `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, expires_at)
			VALUES ($1, $2, $3, 'INIT', 1, 1, 0, now(), now() + interval '1 day')`, req.Key.Tenant(), req.Key.Operation(), req.Key.Value())
		require.NoError(t, err)
	}
	for name, c := range map[string]struct {
		sql        string
		rival      bool
		code       string
		joinedWell bool // a savepoint's end takes it back
	}{
		"role without rights":    {sql: `SET LOCAL ROLE pg_monitor`, code: "42501"},
		"read only":              {sql: `SET TRANSACTION READ ONLY`, code: "25006", joinedWell: true},
		"tiny statement timeout": {sql: `SET LOCAL statement_timeout = '50ms'`, rival: true, code: "57014"},
		"tiny lock timeout":      {sql: `SET LOCAL lock_timeout = '50ms'`, rival: true, code: "55P03"},
	} {
		for way, call := range ways {
			t.Run(name+"/"+way, func(t *testing.T) {
				t.Parallel()
				s := newShop(t)
				req := request(t, "k", "body")
				runs := 0
				_, err := call(t.Context(), s, req, doing("k", func(ctx context.Context, tx pgx.Tx) error {
					if runs++; c.rival {
						rival(t, s, req)
					}
					return statements(c.sql)(ctx, tx)
				}))
				require.Equal(t, 1, runs)
				if c.joinedWell && way == "WithIdempotencyTx" {
					require.NoError(t, err)
					s.requireSound(t, req, true)
					return
				}
				var server *pgconn.PgError
				require.ErrorAs(t, err, &server)
				require.Equal(t, c.code, server.Code)
				for _, not := range []error{
					idempotency.ErrOutcomeUnknown, idempotency.ErrRestart, idempotency.ErrFailed, idempotency.ErrSchema, idempotency.ErrReadOnly,
				} {
					require.NotErrorIs(t, err, not)
				}
				if !c.rival { // it holds the key's place until the test's end
					s.requireSound(t, req, false)
				}
			})
		}
	}
}

// COMMIT takes as long as it takes: PostgreSQL has switched the timeout off by then, and so deferred work is not ended.
func TestMisuse_StatementTimeoutDoesNotEndCommit(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			s.exec(t, `CREATE SEQUENCE commits`)
			s.exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM nextval('commits'), pg_sleep(1.5); RETURN NULL; END $$`)
			s.exec(t, `CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`)
			for begun, try := false, 0; !begun; try++ {
				require.Less(t, try, 20, "no COMMIT was begun")
				_, err := call(t.Context(), s, request(t, "k", "body"), doing("k", statements(`SET LOCAL statement_timeout = '1s'`)))
				require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT is_called FROM commits`).Scan(&begun))
				if begun {
					require.NoError(t, err)
				} else { // a busy machine had not even completed the record within that time
					require.ErrorContains(t, err, "57014")
				}
			}
			s.requireSound(t, request(t, "k", "body"), true)
		})
	}
}

// A violation that shows at COMMIT is the function's own error, and definite.
func TestMisuse_DeferredConstraintShowsAtCommit(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			s.exec(t, `ALTER TABLE orders ADD CONSTRAINT one_note UNIQUE (note) DEFERRABLE INITIALLY IMMEDIATE`)
			s.exec(t, `INSERT INTO orders (key, note) VALUES ('old', 'same')`)
			_, err := call(t.Context(), s, request(t, "k", "body"), doing("k",
				statements(`SET CONSTRAINTS ALL DEFERRED`, `INSERT INTO orders (key, note) VALUES ('k', 'same')`)))
			require.ErrorContains(t, err, "one_note")
			require.NotErrorIs(t, err, idempotency.ErrOutcomeUnknown)
			s.requireSound(t, request(t, "k", "body"), false)
		})
	}
}

// shadows makes every function that our SQL calls one that raises, for whoever finds it first.
const shadows = `CREATE SCHEMA hostile;
	CREATE FUNCTION hostile.no(what text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile %', what; END $$;
	CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('now'); END $$;
	CREATE FUNCTION hostile.statement_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('statement_timestamp'); END $$;
	CREATE FUNCTION hostile.current_setting(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('current_setting'); END $$;
	CREATE FUNCTION hostile.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('set_config'); END $$;
	CREATE FUNCTION hostile.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('nextval'); END $$;
	CREATE FUNCTION hostile.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('lock'); END $$;
	CREATE FUNCTION hostile.pg_is_in_recovery() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('recovery'); END $$;
	CREATE FUNCTION hostile.pg_logical_emit_message(boolean, text, text) RETURNS pg_lsn LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.no('message'); END $$;
	CREATE TABLE hostile.records (key text); CREATE TABLE hostile.attempts (key text)`

// now() of a test's frozen clock, for example, in a schema that comes before pg_catalog.
func TestMisuse_FunctionsNamedLikePostgresOwn(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["search_path"] = "hostile, public, pg_catalog"
				c.ConnConfig.RuntimeParams["synchronous_commit"] = "off" // completion switches it on
			})
			s.exec(t, shadows)
			_, err := s.pool.Exec(t.Context(), `SELECT now()`)
			require.ErrorContains(t, err, "hostile now")
			req := request(t, "k", "body")
			_, err = call(t.Context(), s, req, doing("k", statements()))
			require.NoError(t, err)
			s.requireSound(t, req, true)
			_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = created_at`)
			require.NoError(t, err)
			res, err := call(t.Context(), s, req, doing("k", statements()))
			require.NoError(t, err)
			require.False(t, res.Replayed, "over the expired one")

			boom := errors.New("boom")
			_, err = call(t.Context(), s, request(t, "fails", "body"), doing("fails", func(context.Context, pgx.Tx) error { return boom }))
			require.ErrorIs(t, err, boom)
			_, err = call(t.Context(), s, request(t, "final", "body"), doing("final", func(context.Context, pgx.Tx) error { return txn.Final("no", boom) }))
			require.ErrorIs(t, err, idempotency.ErrFailed)
			require.NoError(t, s.runner.Check(t.Context()))
		})
	}
	t.Run("set by the function", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		s.exec(t, shadows)
		for way, call := range ways {
			_, err := call(t.Context(), s, request(t, way, "body"), doing(way, statements(`SET LOCAL search_path = hostile, pg_catalog`)))
			require.NoError(t, err)
			s.requireSound(t, request(t, way, "body"), true)
		}
	})
}

// COPY FROM STDIN by Exec waits for data that nobody sends: only the caller's context ends it.
func TestMisuse_OpenCopyEndsWithTheContext(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err := call(ctx, s, request(t, "k", "body"), doing("k", statements(`COPY orders (key) FROM STDIN`)))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			s.requireSound(t, request(t, "k", "body"), false)
		})
	}
}
