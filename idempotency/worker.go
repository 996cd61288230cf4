package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// WorkerLease is a worker number that a process has for a time. All times are PostgreSQL's.
type WorkerLease struct {
	Worker int
	Token  AttemptToken // of this lease: nobody renews it who does not present it
	// IssuedBefore is the high-water mark that was found: ids of its millisecond, and before, may be somebody else's.
	IssuedBefore time.Time
	// IssuedUntil is the mark that is stored now: no id may be of a later millisecond.
	IssuedUntil time.Time
	ExpiresAt   time.Time // without a renewal
	Now         time.Time // when PostgreSQL was asked
}

// LeaseWorker leases a worker number, in a transaction of its own where db is a pool or a connection. Nobody gets a number
// before margin has passed behind the end of its lease. ErrNoWorker: none is free.
func (s *Store) LeaseWorker(ctx context.Context, db DB, lease, margin time.Duration) (WorkerLease, error) {
	l := WorkerLease{Token: NewAttemptToken()}
	row, err := dbsqlc.New(db).WorkerLease(ctx, dbsqlc.WorkerLeaseParams{
		LeaseToken: l.Token[:], Executor: s.executor, LeaseUs: lease.Microseconds(), MarginUs: margin.Microseconds(),
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return WorkerLease{}, ErrNoWorker
	case err != nil:
		return WorkerLease{}, fmt.Errorf("idempotency: lease worker number: %w", translate(err))
	}
	l.Worker, l.IssuedBefore, l.IssuedUntil, l.ExpiresAt, l.Now = int(row.Worker), row.IssuedBefore.UTC(), row.IssuedUntil.UTC(), row.LeaseExpiresAt.UTC(), row.Now.UTC()
	return l, nil
}

// RenewWorker keeps a worker number for another lease, also after its end if nobody else has it. ErrLeaseLost: somebody has.
func (s *Store) RenewWorker(ctx context.Context, db DB, l *WorkerLease, lease time.Duration) error {
	row, err := dbsqlc.New(db).WorkerRenew(ctx, dbsqlc.WorkerRenewParams{
		Worker: int16(l.Worker), LeaseToken: l.Token[:], LeaseUs: lease.Microseconds(), //nolint:gosec // at most 1023
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ErrLeaseLost
	case err != nil:
		return fmt.Errorf("idempotency: renew worker number %d: %w", l.Worker, translate(err))
	}
	l.IssuedUntil, l.ExpiresAt, l.Now = row.IssuedUntil.UTC(), row.LeaseExpiresAt.UTC(), row.Now.UTC()
	return nil
}

// ReleaseWorker gives a worker number back whose last id was of the millisecond issued. No id may be made with it any more.
func (s *Store) ReleaseWorker(ctx context.Context, db DB, l *WorkerLease, issued time.Time) error {
	_, err := dbsqlc.New(db).WorkerRelease(ctx, dbsqlc.WorkerReleaseParams{
		Worker: int16(l.Worker), LeaseToken: l.Token[:], IssuedUntil: issued, //nolint:gosec // at most 1023
	})
	if err != nil {
		return fmt.Errorf("idempotency: release worker number %d: %w", l.Worker, translate(err))
	}
	return nil
}
