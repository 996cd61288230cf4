package orms

import (
	"context"
	"database/sql"
	"fmt"
	"sync/atomic"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"entgo.io/ent/dialect/sql/sqlgraph"
	"entgo.io/ent/schema/field"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// entDriver is a driver of ent over the function's transaction: ent.NewClient(ent.Driver(newEntDriver(tx))). A transaction of
// the client is a savepoint.
type entDriver struct {
	*entsql.Driver
	savepoints *atomic.Int64
}

var _ dialect.Driver = (*entDriver)(nil)

func newEntDriver(tx *sql.Tx) *entDriver {
	return &entDriver{entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx}), &atomic.Int64{}}
}

// Close is the client's, whose connection is somebody else's.
func (*entDriver) Close() error { return nil }

func (d *entDriver) Tx(ctx context.Context) (dialect.Tx, error) { return d.BeginTx(ctx, nil) }

// BeginTx is what Client.BeginTx looks for. The isolation level is the runner's.
func (d *entDriver) BeginTx(ctx context.Context, _ *sql.TxOptions) (dialect.Tx, error) {
	t := &entTx{d, fmt.Sprintf("ent_%d", d.savepoints.Add(1))}
	if err := t.send(ctx, "SAVEPOINT "); err != nil {
		return nil, err
	}
	return t, nil
}

type entTx struct {
	*entDriver
	savepoint string
}

func (t *entTx) send(ctx context.Context, sql string) error {
	return t.Exec(ctx, sql+t.savepoint, []any{}, nil)
}

// These two have no context, as driver.Tx has none.

func (t *entTx) Commit() error   { return t.send(context.Background(), "RELEASE SAVEPOINT ") }
func (t *entTx) Rollback() error { return t.send(context.Background(), "ROLLBACK TO SAVEPOINT ") }

// createOrder is what the generated Client.Order.Create().SetKey(key).SetSku(sku).Save(ctx) sends.
func createOrder(ctx context.Context, drv dialect.Driver, key, sku string) (int64, error) {
	spec := sqlgraph.NewCreateSpec("orders", sqlgraph.NewFieldSpec("id", field.TypeInt64))
	spec.SetField("key", field.TypeString, key)
	spec.SetField("sku", field.TypeString, sku)
	if err := sqlgraph.CreateNode(ctx, drv, spec); err != nil {
		return 0, err
	}
	return spec.ID.Value.(int64), nil
}

func TestEnt_OrderAndRecordAreOneCommit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	examine(t, s, func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error) {
		drv := newEntDriver(tx)
		id, err := createOrder(ctx, drv, key, "tea")
		if err != nil {
			return 0, err
		}
		query, args := entsql.Dialect(dialect.Postgres).Insert("audits").Columns("order_id", "note").Values(id, "created").Query()
		if err := drv.Exec(ctx, query, args, nil); err != nil {
			return 0, err
		}
		rows := &entsql.Rows{}
		query, args = entsql.Dialect(dialect.Postgres).Select("id").From(entsql.Table("orders")).Where(entsql.EQ("key", key)).Query()
		if err := drv.Query(ctx, query, args, rows); err != nil {
			return 0, err
		}
		found, err := entsql.ScanInt64(rows)
		require.NoError(t, err)
		require.Equal(t, id, found)
		require.NoError(t, rows.Close())
		return id, then
	})
}

func TestEnt_NestedTransactionsAreSavepoints(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, "k"), func(ctx context.Context, tx *sql.Tx) (int, error) {
		drv := newEntDriver(tx)
		for _, sku := range []string{"undone", "", "kept"} { // the empty one breaks the CHECK
			nested, err := drv.Tx(ctx)
			require.NoError(t, err)
			_, err = createOrder(ctx, nested.(*entTx), "k", sku) // the generated client puts a driver of its own around it
			require.Equal(t, sku == "", err != nil)
			if sku == "kept" {
				require.NoError(t, nested.Commit())
			} else {
				require.NoError(t, nested.Rollback())
			}
		}
		return 0, drv.Close()
	})
	require.NoError(t, err)
	orders, _, records := s.counts(t, "k")
	require.Equal(t, []int{1, 1}, []int{orders, records})
}

func TestEnt_EndsAreRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, "ended"), func(ctx context.Context, tx *sql.Tx) (int, error) {
		if _, err := createOrder(ctx, newEntDriver(tx), "ended", "tea"); err != nil {
			return 0, err
		}
		return 0, (&entsql.Tx{Tx: tx}).Commit()
	})
	require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
	orders, _, records := s.counts(t, "ended")
	require.Zero(t, orders+records)
}
