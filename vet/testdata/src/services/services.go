// Package services is on database/sql.
package services

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jmoiron/sqlx"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
	"gorm.io/gorm"
)

type service struct {
	runner *txnsql.Runner
	db     *sql.DB
	pool   *pgxpool.Pool
	gdb    *gorm.DB
	xdb    *sqlx.DB
	insert *sql.Stmt
}

var req idempotency.Request

// DBTX is sqlc's for database/sql.
type DBTX interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func save(ctx context.Context, db DBTX) error { // want save:"1 effects"
	_, err := db.ExecContext(ctx, `SELECT 1`)
	return err
}

func finish(tx *sql.Tx) error { return tx.Commit() } // want finish:"1 effects"

func (s *service) entrances(ctx context.Context, outer *sql.Tx) {
	_, _ = txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, _ = s.db.ExecContext(ctx, `SELECT 1`)  // want `calls \(\*sql.DB\).ExecContext`
		_, _ = s.pool.Exec(ctx, `SELECT 1`)       // want `calls \(\*pgxpool.Pool\).Exec`
		_ = save(ctx, s.db)                       // want `gives a pool or a connection to services.save` `calls save, which calls its ExecContext`
		_, _ = s.insert.ExecContext(ctx)          // want `calls \(\*sql.Stmt\).ExecContext of what was there before the transaction`
		_, _ = outer.ExecContext(ctx, `SELECT 1`) // want `uses a transaction from around it`
		_ = finish(tx)                            // want `calls finish, which ends the transaction`
		go save(ctx, tx)                          // want `gives the transaction to a goroutine`
		_, _ = tx.Exec(`COMMIT`)                  // want `ends the transaction`
		_, _ = tx.ExecContext(ctx, `rollback`)    // want `ends the transaction`
		_, _ = tx.Exec(`INSERT INTO notes VALUES ($1)`, "commit")
		_, _ = tx.StmtContext(ctx, s.insert).ExecContext(ctx)
		mine := tx.StmtContext(ctx, s.insert)
		_, _ = mine.ExecContext(ctx)
		_ = save(ctx, tx)
		native, _ := txn.FromContext(ctx)
		_, _ = native.Exec(ctx, `SELECT 1`)
		_ = native.Commit(ctx)  // want `ends the transaction`
		return 0, tx.Rollback() // want `ends the transaction`
	})
	_, _ = txnsql.WithIdempotencyTx(ctx, s.runner, outer, req, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, _ = outer.ExecContext(ctx, `SELECT 1`) // it is the same
		_ = outer.Commit()                        // want `ends the transaction`
		return 0, save(ctx, s.db)                 // want `gives a pool` `calls save`
	})
	_, _ = txnsql.WithIdempotencyMany(ctx, s.runner, nil, func(ctx context.Context, tx *sql.Tx, i int) (int, error) {
		_, err := s.db.Begin() // want `calls \(\*sql.DB\).Begin`
		return 0, err
	})
	_, _ = txnsql.WithLease(ctx, s.runner, req, func(ctx context.Context, l *txn.Lease) (int, error) {
		return 0, save(ctx, s.db) // outside any transaction
	}, func(ctx context.Context, tx *sql.Tx, n int) (int, error) {
		return 0, save(ctx, s.db) // want `gives a pool` `calls save`
	})
	_, _ = txn.WithIdempotency(ctx, s.runner.Runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_ = save(ctx, outer) // want `gives services.save a transaction from around it`
		mine, _ := txnsql.FromContext(ctx)
		return 0, mine.Commit() // want `ends the transaction`
	})
}

func (s *service) handler(ctx context.Context) error { // want handler:"1 effects"
	tx, ok := txnsql.FromContext(ctx)
	if !ok {
		return save(ctx, s.db)
	}
	_ = save(ctx, tx)
	return save(ctx, s.db) // want `gives a pool` `calls save`
}

// onTx is that of docs/database_sql.md.
func onTx(ctx context.Context, gdb *gorm.DB, tx *sql.Tx) *gorm.DB {
	session := gdb.Session(&gorm.Session{NewDB: true})
	session.Statement.ConnPool = tx
	return session
}

func create(gdb *gorm.DB) error { return gdb.Create(1).Error } // want create:"1 effects"

func (s *service) gorm(ctx context.Context) {
	_, _ = txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_ = s.gdb.Create(1)                                // want `calls \(\*gorm.DB\).Create of what was there before the transaction`
		_ = s.gdb.WithContext(ctx).Where("id = 1").Find(1) // want `calls \(\*gorm.DB\).Find of`
		again := s.gdb.WithContext(ctx)
		_ = again.Create(1)                            // want `calls \(\*gorm.DB\).Create of`
		_ = create(again)                              // want `calls create, which calls its Create`
		_ = s.gdb.Transaction(func(g *gorm.DB) error { // want `calls \(\*gorm.DB\).Transaction of`
			return g.Create(1).Error // its beginning was told
		})
		_ = onTx(ctx, s.gdb, tx).Create(1)
		g := onTx(ctx, s.gdb, tx)
		_ = g.WithContext(ctx).Create(1)
		session := s.gdb.Session(&gorm.Session{NewDB: true})
		session.Statement.ConnPool = tx
		_ = session.Create(1)
		_ = create(session)
		return 0, create(g)
	})
}

func (s *service) sqlx(ctx context.Context) {
	_, _ = txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (n int, err error) {
		_ = s.xdb.GetContext(ctx, &n, `SELECT 1`)       // want `calls \(\*sqlx.DB\).GetContext`
		_ = s.xdb.QueryRow(`SELECT 1`)                  // want `calls \(\*sql.DB\).QueryRow`
		_ = sqlx.GetContext(ctx, s.xdb, &n, `SELECT 1`) // want `gives a pool or a connection to sqlx.GetContext`
		x := &sqlx.Tx{Tx: tx}
		_ = sqlx.GetContext(ctx, x, &n, `SELECT 1`)
		return n, x.GetContext(ctx, &n, `SELECT 1`)
	})
}
