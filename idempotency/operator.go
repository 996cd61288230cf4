package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Limits of what a person says about a change, in bytes.
const (
	MaxActorBytes  = 255
	MaxReasonBytes = 2000
)

// Blame is who changes a record by hand, and why. Both are kept in idempotency.attempts and never shown to callers.
type Blame struct {
	Actor, Reason string
}

// Validate checks what can be checked without a database.
func (b Blame) Validate() error {
	if err := validateName("actor", b.Actor, MaxActorBytes); err != nil {
		return err
	}
	return validateName("reason", b.Reason, MaxReasonBytes)
}

// OperatorFailure is how a person ends a running record.
type OperatorFailure struct {
	Blame
	// Retryable lets the next caller run the operation again.
	Retryable bool
	// Code and Message are what callers get, now and on every replay.
	Code, Message string
	// Retention is how long the failure is kept, at least MinRetention; Forever: no end.
	Retention time.Duration
	// Force ends it also while its lease runs: its owner may be alive, and loses the key.
	Force bool
}

// Validate checks what can be checked without a database.
func (f *OperatorFailure) Validate() error {
	if err := f.Blame.Validate(); err != nil {
		return err
	}
	if err := validateName("code", f.Code, MaxErrorBytes); err != nil {
		return err
	}
	if err := validateName("message", f.Message, MaxErrorBytes); err != nil {
		return err
	}
	if f.Retention != Forever && f.Retention < MinRetention {
		return &InvalidError{Field: "retention", Rule: fmt.Sprintf("must be at least %v, or for ever", MinRetention)}
	}
	return nil
}

// RefusedError says why a record was not changed by hand, and what to do. It unwraps to ErrRefused.
type RefusedError struct {
	Key Key
	Why string
}

func (e *RefusedError) Error() string { return fmt.Sprintf("%v: %v: %s", ErrRefused, e.Key, e.Why) }

// Unwrap returns ErrRefused.
func (e *RefusedError) Unwrap() error { return ErrRefused }

// Beginner is a pool or a connection of pgx.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// FailByHand ends a PROCESSING record as FAILED and returns its new fence: the old owner's renewals and its outcome are refused
// from then on. It never waits. *RefusedError: nothing was changed. ErrOutcomeUnknown: look before doing it again.
func (s *Store) FailByHand(ctx context.Context, db Beginner, key Key, f *OperatorFailure) (fence int64, err error) {
	if err := f.Validate(); err != nil {
		return 0, err
	}
	return s.byHand(ctx, db, key, func(q *dbsqlc.Queries, next int64, r *dbsqlc.OperatorRowRow) (int64, error) {
		switch {
		case r.Expired:
			return 0, &RefusedError{key, "it is EXPIRED and counts as absent: there is nothing to end"}
		case State(r.State) == StateInit:
			return 0, &RefusedError{key, "it is INIT, a token nobody has used: there is nothing to end; expire it if nobody may use it"}
		case State(r.State) != StateProcessing:
			return 0, &RefusedError{key, "it is " + r.State + " already, and an outcome that callers have seen is not changed; " +
				"expire it if the operation is to run again"}
		case !r.TimedOut && !f.Force:
			return 0, &RefusedError{key, "its lease runs until " + timeOf(r.LeaseExpiresAt).Format(time.RFC3339) +
				", so its owner may be alive: wait, or force it, and the owner loses the key"}
		}
		outcome := string(StateFailed)
		if err := q.OperatorAttempt(ctx, dbsqlc.OperatorAttemptParams{
			Outcome: &outcome, ErrorCode: &f.Code, ErrorMessage: &f.Message, Actor: f.Actor, Reason: f.Reason,
			Tenant: key.tenant, Operation: key.operation, Key: key.value,
		}); err != nil {
			return 0, err
		}
		if _, err := q.OperatorAttemptsEnd(ctx, dbsqlc.OperatorAttemptsEndParams{
			ErrorCode: f.Code, ErrorMessage: f.Message, Actor: f.Actor, Reason: f.Reason,
			Tenant: key.tenant, Operation: key.operation, Key: key.value,
		}); err != nil {
			return 0, err
		}
		return q.OperatorFail(ctx, dbsqlc.OperatorFailParams{
			Retryable: f.Retryable, NextFence: next, RetentionUs: microseconds(f.Retention), ErrorCode: f.Code,
			ErrorMessage: f.Message, Tenant: key.tenant, Operation: key.operation, Key: key.value, Fence: r.Fence, Force: f.Force,
		})
	})
}

// ExpireByHand makes a record count as absent from now on, so that the next caller runs the operation again. changed is false
// for one that is EXPIRED already. It never waits, and errors are those of FailByHand. What fronts keep of the record
// is still there afterwards: evict it.
func (s *Store) ExpireByHand(ctx context.Context, db Beginner, key Key, b Blame) (fence int64, changed bool, err error) {
	if err := b.Validate(); err != nil {
		return 0, false, err
	}
	fence, err = s.byHand(ctx, db, key, func(q *dbsqlc.Queries, next int64, r *dbsqlc.OperatorRowRow) (int64, error) {
		switch {
		case State(r.State) == StateProcessing:
			return 0, &RefusedError{key, "it is PROCESSING, and expired it could run beside its owner: fail it"}
		case r.Expired:
			return r.Fence, nil
		}
		if err := q.OperatorAttempt(ctx, dbsqlc.OperatorAttemptParams{
			Actor: b.Actor, Reason: b.Reason, Tenant: key.tenant, Operation: key.operation, Key: key.value,
		}); err != nil {
			return 0, err
		}
		changed = true
		return q.OperatorExpire(ctx, dbsqlc.OperatorExpireParams{
			NextFence: next, Tenant: key.tenant, Operation: key.operation, Key: key.value, Fence: r.Fence,
		})
	})
	return fence, changed && err == nil, err
}

// byHand runs change in a transaction that holds the key's lock and its row.
func (s *Store) byHand(
	ctx context.Context, db Beginner, key Key, change func(*dbsqlc.Queries, int64, *dbsqlc.OperatorRowRow) (int64, error),
) (fence int64, err error) {
	if key.IsZero() {
		return 0, &InvalidError{Field: "key", Rule: "must be set"}
	}
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return 0, fmt.Errorf("idempotency: change %v: %w", key, readOnly(err))
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	q := dbsqlc.New(tx)
	fence, err = underLock(ctx, q, key, change)
	if err != nil {
		return 0, fmt.Errorf("idempotency: change %v: %w", key, translate(err))
	}
	if err := tx.Commit(ctx); err != nil {
		if definite(err) || errors.Is(err, pgx.ErrTxCommitRollback) {
			return 0, fmt.Errorf("idempotency: change %v: %w", key, translate(err))
		}
		return 0, unknown(err)
	}
	return fence, nil
}

func underLock(
	ctx context.Context, q *dbsqlc.Queries, key Key, change func(*dbsqlc.Queries, int64, *dbsqlc.OperatorRowRow) (int64, error),
) (int64, error) {
	lock, err := q.OperatorLock(ctx, key.LockID())
	if err != nil {
		return 0, err
	}
	if lock.Fence == 0 {
		return 0, &RefusedError{key, "a transaction holds the key right now: look at it with get, and try again when it has ended"}
	}
	row, err := q.OperatorRow(ctx, dbsqlc.OperatorRowParams{Tenant: key.tenant, Operation: key.operation, Key: key.value})
	var server *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, &RefusedError{key, "there is no record of this key"}
	case errors.As(err, &server) && server.Code == "55P03": // lock_not_available
		return 0, &RefusedError{key, "its owner is completing it right now: look again in a moment"}
	case err != nil:
		return 0, err
	}
	fence, err := change(q, lock.Fence, &row)
	if errors.Is(err, pgx.ErrNoRows) {
		// The row is locked and its lease cannot move: only a clock that went back comes here.
		return 0, &RefusedError{key, "the record changed meanwhile: look at it again"}
	}
	return fence, err
}
