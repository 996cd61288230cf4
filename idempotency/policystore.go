package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// ListPolicies returns the policies as they are stored. doubts, an ErrNewerPolicy, is what this release does not know of them.
func (s *Store) ListPolicies(ctx context.Context, db DB) (all []Policy, doubts, err error) {
	read, doubts, err := readAll(ctx, db)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range read.list() {
		all = append(all, *p)
	}
	return all, doubts, nil
}

// ChangePolicy has change alter a policy, or a new one that enforces everything, and stores it with who and why. Nobody else
// changes any meanwhile. before is nil for a new one. An error of change, or an InvalidError, changes nothing;
// ErrOutcomeUnknown: look before doing it again.
func (s *Store) ChangePolicy(ctx context.Context, db Beginner, scope Scope, name string, b Blame, change func(*Policy)) (before, after *Policy, err error) {
	after = &Policy{Scope: scope, Name: name, Enforcement: EnforcementEnforce, Percentage: 100}
	err = s.changePolicies(ctx, db, b, func(q *dbsqlc.Queries) error {
		row, err := q.PolicyGet(ctx, dbsqlc.PolicyGetParams{Scope: string(scope), Name: name})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
		case err != nil:
			return err
		default:
			before, err = readPolicy(&dbsqlc.PolicyListRow{
				Scope: string(scope), Name: name, Enforcement: row.Enforcement, Percentage: row.Percentage, Strategy: row.Strategy,
				LocalFront: row.LocalFront, WaitUs: row.WaitUs,
			})
			if err != nil {
				return err // half of it would be lost
			}
			was := *before
			after = &was
		}
		change(after)
		after.Blame = b
		if err := after.Validate(); err != nil {
			return err
		}
		p := dbsqlc.PolicySetParams{
			Scope: string(scope), Name: name, Enforcement: string(after.Enforcement), Percentage: int16(after.Percentage), //nolint:gosec // validated
			Strategy: optional(string(after.Strategy)), LocalFront: after.Local, Actor: b.Actor, Reason: b.Reason,
		}
		if after.Wait != nil {
			p.WaitUs = microseconds(*after.Wait)
		}
		return q.PolicySet(ctx, p)
	})
	if err != nil {
		return nil, nil, err
	}
	return before, after, nil
}

// RemovePolicy removes a policy, so that a wider one counts, or everything is enforced as declared. removed is false where
// there is none. Errors are those of ChangePolicy.
func (s *Store) RemovePolicy(ctx context.Context, db Beginner, scope Scope, name string, b Blame) (removed bool, err error) {
	err = s.changePolicies(ctx, db, b, func(q *dbsqlc.Queries) error {
		n, err := q.PolicyDelete(ctx, dbsqlc.PolicyDeleteParams{Scope: string(scope), Name: name})
		removed = n > 0
		return err
	})
	return removed && err == nil, err
}

func (s *Store) changePolicies(ctx context.Context, db Beginner, b Blame, change func(*dbsqlc.Queries) error) error {
	if err := b.Validate(); err != nil {
		return err
	}
	return inOperatorTx(ctx, db, "change policy", func(q *dbsqlc.Queries) error {
		if err := q.PolicyLock(ctx); err != nil {
			return err
		}
		if err := q.PolicyBlame(ctx, dbsqlc.PolicyBlameParams{Actor: b.Actor, Reason: b.Reason}); err != nil {
			return err
		}
		return change(q)
	})
}

// inOperatorTx is a transaction in which a person changes something.
func inOperatorTx(ctx context.Context, db Beginner, what string, change func(*dbsqlc.Queries) error) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return fmt.Errorf("idempotency: %s: %w", what, readOnly(err))
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := change(dbsqlc.New(tx)); err != nil {
		return fmt.Errorf("idempotency: %s: %w", what, translate(err))
	}
	if err := tx.Commit(ctx); err != nil {
		if definite(err) || errors.Is(err, pgx.ErrTxCommitRollback) {
			return fmt.Errorf("idempotency: %s: %w", what, translate(err))
		}
		return unknown(err)
	}
	return nil
}

// PolicyChange is one row of idempotency.policy_changes.
type PolicyChange struct {
	ID            int64
	Scope         Scope
	Name          string
	Before, After string // the row, as JSON; empty: there was none, or is none
	Blame
	ChangedBy string // the session's user
	ChangedAt time.Time
}

// PolicyChanges returns the latest changes of policies, the youngest first.
func (s *Store) PolicyChanges(ctx context.Context, db DB, limit int) ([]PolicyChange, error) {
	rows, err := dbsqlc.New(db).PolicyChangeList(ctx, int32(limit)) //nolint:gosec // a page
	if err != nil {
		return nil, fmt.Errorf("idempotency: list changes of policies: %w", translate(err))
	}
	all := make([]PolicyChange, len(rows))
	for i, row := range rows {
		all[i] = PolicyChange{
			ID: row.ID, Scope: Scope(row.Scope), Name: row.Name, Before: row.OldRow, After: row.NewRow,
			Blame: Blame{Actor: row.Actor, Reason: row.Reason}, ChangedBy: row.ChangedBy, ChangedAt: row.ChangedAt.UTC(),
		}
	}
	return all, nil
}
