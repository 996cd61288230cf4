package orms

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// Order is a model with a hook that writes too.
type Order struct {
	ID  int64
	Key string
	SKU string `gorm:"column:sku"`
}

// Audit is what the hook writes.
type Audit struct {
	ID      int64
	OrderID int64
	Note    string
}

// AfterCreate writes an audit, and refuses poison.
func (o *Order) AfterCreate(tx *gorm.DB) error {
	if o.SKU == "poison" {
		return errBoom
	}
	return tx.Create(&Audit{OrderID: o.ID, Note: "created"}).Error
}

// openGORM is called once, when the program starts.
func openGORM(db *sql.DB) (*gorm.DB, error) {
	return gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{Logger: logger.Discard})
}

// onTx is GORM on the function's transaction. The session has a context, so it has a statement of its own: gdb stays on its sql.DB.
func onTx(ctx context.Context, gdb *gorm.DB, tx *sql.Tx) *gorm.DB {
	session := gdb.Session(&gorm.Session{NewDB: true, Context: ctx, SkipDefaultTransaction: true})
	session.Statement.ConnPool = tx
	return session
}

func newGORMShop(t *testing.T) (*shop, *gorm.DB) {
	t.Helper()
	s := newShop(t)
	gdb, err := openGORM(s.db)
	require.NoError(t, err)
	return s, gdb
}

func TestGORM_OrderAndRecordAreOneCommit(t *testing.T) {
	t.Parallel()
	s, gdb := newGORMShop(t)
	examine(t, s, func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error) {
		o := Order{Key: key, SKU: "tea"}
		if err := onTx(ctx, gdb, tx).Create(&o).Error; err != nil { // and its audit, by the hook
			return 0, err
		}
		return o.ID, then
	})
}

// A gorm.DB opened on the *sql.Tx does the same; it parses its models anew each time.
func TestGORM_OpenedOnTheTransaction(t *testing.T) {
	t.Parallel()
	for _, config := range []gorm.Config{{}, {SkipDefaultTransaction: true}} {
		s := newShop(t)
		config.Logger = logger.Discard
		examine(t, s, func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error) {
			gdb, err := gorm.Open(postgres.New(postgres.Config{Conn: tx}), &config)
			if err != nil {
				return 0, err
			}
			o := Order{Key: key, SKU: "tea"}
			if err := gdb.WithContext(ctx).Create(&o).Error; err != nil {
				return 0, err
			}
			return o.ID, then
		})
	}
}

// PrepareStmt keeps statements for a sql.DB: a gorm.DB with it works by sessions, and cannot be opened on a *sql.Tx.
func TestGORM_PrepareStmt(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	gdb, err := gorm.Open(postgres.New(postgres.Config{Conn: s.db}), &gorm.Config{PrepareStmt: true, Logger: logger.Discard})
	require.NoError(t, err)
	examine(t, s, func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error) {
		o := Order{Key: key, SKU: "tea"}
		if err := onTx(ctx, gdb, tx).Create(&o).Error; err != nil {
			return 0, err
		}
		return o.ID, then
	})
	_, err = txnsql.WithIdempotency(t.Context(), s.runner, request(t, "opened"), func(_ context.Context, tx *sql.Tx) (int, error) {
		_, err := gorm.Open(postgres.New(postgres.Config{Conn: tx}), &gorm.Config{PrepareStmt: true, Logger: logger.Discard})
		return 0, err
	})
	require.ErrorIs(t, err, gorm.ErrInvalidDB)
}

// Transaction inside the function is a savepoint; Begin, Commit and Rollback are refused.
func TestGORM_NestedTransactions(t *testing.T) {
	t.Parallel()
	s, gdb := newGORMShop(t)
	req := request(t, "k")
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int, error) {
		g := onTx(ctx, gdb, tx)
		err := g.Transaction(func(g *gorm.DB) error {
			require.NoError(t, g.Create(&Order{Key: "k", SKU: "undone"}).Error)
			return errBoom
		})
		require.ErrorIs(t, err, errBoom)
		require.NoError(t, g.Transaction(func(g *gorm.DB) error { return g.Create(&Order{Key: "k", SKU: "kept"}).Error }))
		require.ErrorIs(t, g.Begin().Error, gorm.ErrInvalidTransaction)
		return 0, nil
	})
	require.NoError(t, err)
	orders, audits, records := s.counts(t, "k")
	require.Equal(t, []int{1, 1, 1}, []int{orders, audits, records})

	for _, end := range []func(*gorm.DB) *gorm.DB{(*gorm.DB).Commit, (*gorm.DB).Rollback} {
		_, err = txnsql.WithIdempotency(t.Context(), s.runner, request(t, "ended"), func(ctx context.Context, tx *sql.Tx) (int, error) {
			g := onTx(ctx, gdb, tx)
			require.NoError(t, g.Create(&Order{Key: "ended", SKU: "tea"}).Error)
			return 0, end(g).Error
		})
		require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
		orders, _, records = s.counts(t, "ended")
		require.Zero(t, orders+records)
	}
}

// GORM's errors are values of a chain: easily forgotten, and not all of them are PostgreSQL's.
func TestGORM_ErrorsOfHooksAndForgottenOnes(t *testing.T) {
	t.Parallel()
	s, gdb := newGORMShop(t)
	call := func(key string, do func(g *gorm.DB) error) error {
		_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, key), func(ctx context.Context, tx *sql.Tx) (int, error) {
			return 0, do(onTx(ctx, gdb, tx))
		})
		return err
	}
	for _, c := range []struct {
		name    string
		do      func(g *gorm.DB) error
		is      error
		orders  int
		records int
	}{
		{"a hook's, returned", func(g *gorm.DB) error { return g.Create(&Order{Key: "a hook's, returned", SKU: "poison"}).Error }, errBoom, 0, 0},
		// Its INSERT has succeeded, and the function says that all is well.
		{"a hook's, forgotten", func(g *gorm.DB) error { g.Create(&Order{Key: "a hook's, forgotten", SKU: "poison"}); return nil }, nil, 1, 1},
		{"PostgreSQL's, forgotten", func(g *gorm.DB) error {
			g.Create(&Order{Key: "PostgreSQL's, forgotten", SKU: "tea"})
			g.Create(&Order{Key: "PostgreSQL's, forgotten"}) // no sku: the CHECK
			return nil
		}, idempotency.ErrAborted, 0, 0},
		{"not found", func(g *gorm.DB) error {
			require.ErrorIs(t, g.First(&Order{}, "key = ?", "nobody's").Error, gorm.ErrRecordNotFound)
			return g.Create(&Order{Key: "not found", SKU: "tea"}).Error
		}, nil, 1, 1},
	} {
		err := call(c.name, c.do)
		if c.is == nil {
			require.NoError(t, err, c.name)
		} else {
			require.ErrorIs(t, err, c.is, c.name)
		}
		orders, _, records := s.counts(t, c.name)
		require.Equal(t, []int{c.orders, c.records}, []int{orders, records}, c.name)
	}
}

// Many at once on one gorm.DB: each on its own transaction, and the gorm.DB itself on none of them.
func TestGORM_SessionsAreKeptApart(t *testing.T) {
	t.Parallel()
	s, gdb := newGORMShop(t)
	s.db.SetMaxOpenConns(8)
	var group sync.WaitGroup
	errs := make([]error, 64)
	for i := range errs {
		group.Go(func() {
			key := fmt.Sprint("k", i%32)
			_, errs[i] = txnsql.WithIdempotency(t.Context(), s.runner, request(t, key), func(ctx context.Context, tx *sql.Tx) (int64, error) {
				o := Order{Key: key, SKU: "tea"}
				return o.ID, onTx(ctx, gdb, tx).Create(&o).Error
			})
		})
	}
	group.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Same(t, s.db, gdb.Statement.ConnPool)
	var n int64
	require.NoError(t, gdb.Model(&Order{}).Count(&n).Error)
	require.EqualValues(t, 32, n)
}

// GORM in a transaction of its own, which an operation joins.
func TestGORM_JoinedInATransactionOfGORM(t *testing.T) {
	t.Parallel()
	s, gdb := newGORMShop(t)
	for _, then := range []error{errBoom, nil} {
		var joined *txn.Joined[int64]
		err := gdb.WithContext(t.Context()).Transaction(func(g *gorm.DB) (err error) {
			tx, is := g.Statement.ConnPool.(*sql.Tx)
			require.True(t, is)
			joined, err = txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k"), func(ctx context.Context, tx *sql.Tx) (int64, error) {
				o := Order{Key: "k", SKU: "tea"}
				err := onTx(ctx, gdb, tx).Create(&o).Error
				return o.ID, err
			})
			require.NoError(t, err)
			return then
		})
		require.ErrorIs(t, err, then)
		if then != nil {
			require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrNotRecorded)
			continue
		}
		require.NoError(t, joined.AfterCommit(t.Context()))
	}
	orders, audits, records := s.counts(t, "k")
	require.Equal(t, []int{1, 1, 1}, []int{orders, audits, records})
}
