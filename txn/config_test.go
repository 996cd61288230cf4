package txn_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// lazyPool is a configured pool that never connects.
func lazyPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestNew_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	op := func(change func(*idempotency.Operation)) *txn.Config {
		o := idempotency.Operation{Name: "order.create"}
		change(&o)
		return &txn.Config{Operations: []idempotency.Operation{o}}
	}
	with := func(change func(*txn.Config)) *txn.Config {
		c := &txn.Config{Operations: []idempotency.Operation{create}}
		change(c)
		return c
	}
	for name, test := range map[string]struct {
		config *txn.Config
		field  string
	}{
		"no configuration":           {nil, "Config.Operations"},
		"no operation":               {&txn.Config{}, "Config.Operations"},
		"operation twice":            {&txn.Config{Operations: []idempotency.Operation{create, create}}, "Config.Operations"},
		"nameless operation":         {op(func(o *idempotency.Operation) { o.Name = "" }), "Operation.Name"},
		"long name":                  {op(func(o *idempotency.Operation) { o.Name = strings.Repeat("x", 129) }), "Operation.Name"},
		"retention below the floor":  {op(func(o *idempotency.Operation) { o.Retention = time.Minute }), "Operation order.create: Retention"},
		"negative wait":              {op(func(o *idempotency.Operation) { o.Wait = -2 }), "Operation order.create: Wait"},
		"wait beyond retention":      {op(func(o *idempotency.Operation) { o.Wait = 40 * time.Hour }), "Operation order.create: Wait"},
		"result outlives its record": {op(func(o *idempotency.Operation) { o.ResultRetention = 100 * time.Hour }), "Operation order.create: ResultRetention"},
		"result for ever":            {op(func(o *idempotency.Operation) { o.ResultRetention = idempotency.Forever }), "Operation order.create: ResultRetention"},
		"unknown strategy":           {op(func(o *idempotency.Operation) { o.Strategy = "FAST" }), "Operation order.create: Strategy"},
		"strategy without a front":   {op(func(o *idempotency.Operation) { o.Strategy = idempotency.StrategyCache }), "Operation order.create: Strategy"},
		"unknown takeover":           {op(func(o *idempotency.Operation) { o.Takeover = "STEAL" }), "Operation order.create: Takeover"},
		"short lease":                {op(func(o *idempotency.Operation) { o.Lease = time.Millisecond }), "Operation order.create: Lease"},
		"short life of tokens":       {op(func(o *idempotency.Operation) { o.TokenLife = time.Millisecond }), "Operation order.create: TokenLife"},
		"tokens in Redis alone": {
			op(func(o *idempotency.Operation) { o.RequireIssued, o.Strategy = true, idempotency.StrategyCache }), "Operation order.create: RequireIssued",
		},
		"isolation":            {with(func(c *txn.Config) { c.Isolation = "chaos" }), "Config.Isolation"},
		"retries":              {with(func(c *txn.Config) { c.MaxRetries = -2 }), "Config.MaxRetries"},
		"waiters":              {with(func(c *txn.Config) { c.MaxWaiters = -2 }), "Config.MaxWaiters"},
		"commit timeout":       {with(func(c *txn.Config) { c.CommitTimeout = time.Hour }), "Config.CommitTimeout"},
		"codec without a name": {with(func(c *txn.Config) { c.Codec = namelessCodec{} }), "Config.Codec"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := txn.New(lazyPool(t), test.config)
			var wrong *idempotency.ConfigError
			require.ErrorAs(t, err, &wrong)
			require.ErrorIs(t, err, idempotency.ErrConfig)
			require.Equal(t, test.field, wrong.Field)
			require.Contains(t, wrong.Rule, "must")
		})
	}
}

type namelessCodec struct{ txn.JSON }

func (namelessCodec) Name() string { return "" }

func TestNew_PoolWithoutTheHookIsReported(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return nil }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "txn.ConfigurePool")

	_, err = txn.New(nil, nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
}

func TestNew_SimpleProtocolIsRefused(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?default_query_exec_mode=simple_protocol")
	require.NoError(t, err)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "QueryExecModeExec")
}

func TestConfigurePool_KeepsTheCallersHooks(t *testing.T) {
	t.Parallel()
	calls := make(chan string, 10)
	s := newShopWith(t, func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { calls <- "before"; return nil }
		txn.ConfigurePool(c)
		txn.ConfigurePool(c) // twice is once
	})
	_, err := s.place(t.Context(), request(t, "k", "body"))
	require.NoError(t, err)
	require.Equal(t, "before", <-calls)
}

func TestCall_BadRequestIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	runner, err := txn.New(lazyPool(t), &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	s := &shop{runner: runner}
	good := request(t, "k", "body")
	undeclared, err := idempotency.Operation{Name: "other"}.Key("-", "k")
	require.NoError(t, err)
	_, err = s.place(t.Context(), idempotency.Request{Key: good.Key, Fingerprint: good.Fingerprint, Client: "\x00"})
	var invalid *idempotency.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "client", invalid.Field)
	for field, req := range map[string]idempotency.Request{
		"Request.Key":         {Fingerprint: good.Fingerprint},
		"Request.Fingerprint": {Key: good.Key},
		"operation":           {Key: undeclared, Fingerprint: good.Fingerprint},
	} {
		_, err := s.place(t.Context(), req)
		var wrong *idempotency.ConfigError
		require.ErrorAs(t, err, &wrong, field)
		require.Equal(t, field, wrong.Field)
	}
}

func TestCall_MissingSchemaNamesTheCommand(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(pgtest.EmptyURL(t))
	require.NoError(t, err)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	s := &shop{runner: runner}
	_, err = s.place(t.Context(), request(t, "k", "body"))
	require.ErrorIs(t, err, idempotency.ErrSchema)
	require.ErrorContains(t, err, "db.Migrate")
	require.ErrorContains(t, err, "-table public.pgonce_goose_version")

	_, err = pool.Exec(t.Context(), `CREATE SCHEMA idempotency; CREATE FUNCTION idempotency.schema_version() RETURNS int LANGUAGE sql AS 'SELECT 0'`)
	require.NoError(t, err)
	_, err = s.place(t.Context(), request(t, "k", "body"))
	var schema *idempotency.SchemaError
	require.ErrorAs(t, err, &schema)
	require.Equal(t, idempotency.SchemaVersion, schema.Want)
}

func TestCall_EveryQueryModeAndIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec,
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(mode.String()+", "+string(level), func(t *testing.T) {
				t.Parallel()
				s := newShopWith(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }, func(c *txn.Config) { c.Isolation = level })
				req := request(t, "k", "body")
				req.Client = "somebody"
				first, err := s.place(t.Context(), req)
				require.NoError(t, err)
				again, err := s.place(t.Context(), req)
				require.NoError(t, err)
				require.Equal(t, first.Record, again.Record)
				_, err = s.direct.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp()`)
				require.NoError(t, err)
				replaced, err := s.place(t.Context(), req)
				require.NoError(t, err)
				require.False(t, replaced.Replayed)
				require.Greater(t, replaced.Record.Fence, first.Record.Fence)
				require.Equal(t, replaced.Record.Fence, replaced.Record.Generation)
				stored, found := s.record(t, req)
				require.True(t, found)
				require.Equal(t, replaced.Record, stored)

				tx := s.begin(t, pgx.TxOptions{IsoLevel: level})
				joined, err := s.join(t.Context(), tx, request(t, "joined", "body"))
				require.NoError(t, err)
				require.NoError(t, tx.Commit(t.Context()))
				require.NoError(t, joined.AfterCommit(t.Context()))
			})
		}
	}
}

func TestCall_LostPreparedStatementsArePreparedAgain(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	_, err := s.place(t.Context(), request(t, "k1", "body"))
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), `DEALLOCATE ALL`, pgx.QueryExecModeExec)
	require.NoError(t, err)
	_, err = s.place(t.Context(), request(t, "k2", "body"))
	require.NoError(t, err)
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "k3", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k3")
		_, deallocated := tx.Exec(ctx, `DEALLOCATE ALL`, pgx.QueryExecModeExec)
		return o, errors.Join(err, deallocated)
	})
	require.NoError(t, err, "its second run is completed without named statements")
	require.Equal(t, 1, s.orders(t, "k3"))
}

func TestCall_MigrationUnderARunningProgramIsNoticed(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	_, err := s.place(t.Context(), request(t, "k1", "body"))
	require.NoError(t, err)
	s.exec(t, `ALTER TABLE idempotency.records ALTER COLUMN attempt_token TYPE bytea`)
	for _, key := range []string{"k1", "k2"} {
		_, err = s.place(t.Context(), request(t, key, "body"))
		require.NoError(t, err)
		require.Equal(t, 1, s.orders(t, key))
	}
}

func TestRunner_OperationHasItsDefaults(t *testing.T) {
	t.Parallel()
	runner, err := txn.New(lazyPool(t), &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	op, declared := runner.Operation(create.Name)
	require.True(t, declared)
	require.Equal(t, idempotency.DefaultWait, op.Wait)
	require.Equal(t, idempotency.StrategyStrict, op.Strategy)
	_, declared = runner.Operation("nobody.knows")
	require.False(t, declared)
}
