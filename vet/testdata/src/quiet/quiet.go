// Package quiet does everything as it should.
package quiet

import (
	"context"
	"net/http"
	"store"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

type service struct {
	runner, other *txn.Runner
	pool          *pgxpool.Pool
	store         *store.Store
}

func (s *service) place(ctx context.Context, req idempotency.Request) error { // want place:"2 effects"
	if err := s.store.Audit(ctx, "before"); err != nil {
		return err
	}
	_, err := txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, _ = tx.Exec(ctx, `INSERT INTO orders DEFAULT VALUES`)
		_, _ = tx.Conn().Exec(ctx, `SELECT 1`)
		conn := tx.Conn()
		_, _ = conn.Exec(ctx, `SELECT 1`)
		_ = store.Save(ctx, tx)
		_ = store.SaveOn(ctx, tx.Conn())
		_ = store.SaveOn(ctx, conn)
		_ = store.New(tx).Insert(ctx)
		_ = pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
			_, err := savepoint.Exec(ctx, `SELECT 1`)
			return err
		})
		savepoint, _ := tx.Begin(ctx)
		defer savepoint.Rollback(ctx)
		_, _ = savepoint.Exec(ctx, `SELECT 1`)
		_ = savepoint.Commit(ctx)
		_ = store.Finish(ctx, savepoint)
		_ = s.either(ctx)
		_ = s.eitherElse(ctx)
		_ = s.neither(ctx)
		// Another runner has a transaction of its own, and its leased call may wait for somebody.
		_, _ = txn.WithIdempotencyTx(ctx, s.other, tx, req, func(ctx context.Context, tx pgx.Tx) (int, error) { return 0, store.Save(ctx, tx) })
		_, _ = txn.WithLease(ctx, s.other, req, func(ctx context.Context, l *txn.Lease) (int, error) { return 0, store.Notify() },
			func(ctx context.Context, tx pgx.Tx, n int) (int, error) { return n, store.Save(ctx, tx) })
		_, err := tx.Exec(ctx, `ROLLBACK TO SAVEPOINT mine`)
		_, _ = tx.Exec(ctx, `INSERT INTO notes VALUES ('commit')`)
		return 0, err
	})
	_, _ = http.Get("http://localhost/placed")
	return err
}

// either is for both: in a function and elsewhere.
func (s *service) either(ctx context.Context) error {
	if tx, ok := txn.FromContext(ctx); ok {
		return store.Save(ctx, tx)
	}
	return store.Save(ctx, s.pool)
}

func (s *service) eitherElse(ctx context.Context) (err error) {
	tx, ok := txn.FromContext(ctx)
	if ok {
		err = store.Save(ctx, tx)
	} else {
		err = store.Save(ctx, s.pool)
	}
	return err
}

func (s *service) neither(ctx context.Context) error {
	tx, ok := txn.FromContext(ctx)
	if !ok {
		return store.Save(ctx, s.pool)
	}
	return store.Save(ctx, tx)
}

// outsideOnly refuses to be called inside, and then does as it likes.
func (s *service) outsideOnly(ctx context.Context) error {
	if _, inside := txn.FromContext(ctx); inside {
		panic("call it before")
	}
	return store.Save(ctx, s.pool)
}

func (s *service) checks(ctx context.Context, r *service) error { // want checks:"1 effects"
	_, inside := txn.FromContext(ctx)
	_ = inside
	return store.Save(ctx, s.pool)
}
