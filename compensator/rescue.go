package compensator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// reasonStale is written into the audit.
const reasonStale = "the lease has ended and its owner did not come back"

// stalePage is how many are listed at a time.
const stalePage = 500

// rescue goes once through everything that was stale when it began, page behind page: rows that nobody may touch hold up
// nothing.
func (c *Compensator) rescue(ctx context.Context, until time.Time, report *Report) error {
	var last *idempotency.Stale
	var errs []error
	for {
		var page []idempotency.Stale
		err := c.call(ctx, func(ctx context.Context) (err error) {
			page, err = c.store.ListStale(ctx, c.pool, until, last, stalePage)
			return err
		})
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, c.rescuePage(ctx, page, report)...)
		if len(page) < stalePage || len(errs) > maxErrors {
			return errors.Join(errs...)
		}
		last = &page[len(page)-1]
	}
}

// maxErrors end a pass: the database or a gateway is away, and the next pass will come.
const maxErrors = 100

func (c *Compensator) rescuePage(ctx context.Context, page []idempotency.Stale, report *Report) (errs []error) {
	var mu sync.Mutex
	var group sync.WaitGroup
	slots := make(chan struct{}, c.config.Workers)
	for _, one := range page {
		slots <- struct{}{}
		if ctx.Err() != nil {
			break // what is on its way is finished
		}
		group.Go(func() {
			defer func() { <-slots }()
			field, err := c.guarded(ctx, one)
			mu.Lock()
			defer mu.Unlock()
			report.Stale++
			field(report)
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	group.Wait()
	return errs
}

// guarded makes an error of a Resolver's panic: it must not end the process, and the next pass comes to the record again.
func (c *Compensator) guarded(ctx context.Context, one idempotency.Stale) (field func(*Report), err error) {
	defer func() {
		if p := recover(); p != nil {
			field, err = unresolved, fmt.Errorf("compensator: resolver of %v panicked: %v", one.Key, p)
		}
	}()
	return c.rescueOne(ctx, one)
}

func rescued(r *Report)    { r.Rescued++ }
func resolved(r *Report)   { r.Resolved++ }
func unresolved(r *Report) { r.Unresolved++ }
func manual(r *Report)     { r.Manual++ }
func undeclared(r *Report) { r.Undeclared++ }
func gone(r *Report)       { r.Stale-- } // somebody else was faster

// rescueOne finishes one record as its own rule says, and returns what it counts as.
func (c *Compensator) rescueOne(ctx context.Context, one idempotency.Stale) (func(*Report), error) {
	op, declared := c.operations[one.Key.Operation()]
	switch {
	case !declared:
		return undeclared, nil
	case one.Takeover == idempotency.TakeoverManual, one.Takeover == idempotency.TakeoverResolve && op.Resolver == nil:
		return manual, nil
	case one.Takeover == idempotency.TakeoverResolve && c.config.DryRun:
		return unresolved, nil
	case one.Takeover == idempotency.TakeoverResolve:
		return c.resolve(ctx, op, one)
	case c.config.DryRun:
		return rescued, nil
	}
	var done bool
	err := c.change(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		done, err = c.store.Rescue(ctx, conn, one, c.config.Actor, reasonStale, op.Retention)
		return err
	})
	if err != nil || !done {
		return gone, err
	}
	return rescued, nil
}

// resolve takes the key over, in a commit of its own, and finds out what its owner did.
func (c *Compensator) resolve(ctx context.Context, op idempotency.Operation, one idempotency.Stale) (func(*Report), error) {
	var a idempotency.LeaseAcquisition
	var steps []idempotency.Step
	began := time.Now()
	err := c.change(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		r, found, err := c.store.LookupIn(ctx, conn, one.Key)
		if err != nil || !found {
			return err
		}
		a, err = c.store.AcquireLease(ctx, conn, &idempotency.LeaseRequest{
			Request:      idempotency.Request{Key: one.Key, Fingerprint: r.Fingerprint, Client: r.Client},
			AttemptToken: idempotency.NewAttemptToken(), Lease: op.Lease, Takeover: op.Takeover, CanResolve: true, TraceID: r.TraceID,
		})
		if err == nil && a.Verdict == idempotency.VerdictResolve {
			steps, err = c.store.Steps(ctx, conn, &a.Record)
		}
		return err
	})
	if err != nil || a.Verdict != idempotency.VerdictResolve {
		return gone, err
	}
	// The lease is not renewed: a Resolver that takes longer is asked again by the next pass.
	bounded, cancel := context.WithTimeout(ctx, op.Lease-time.Since(began))
	defer cancel()
	found, err := op.Resolver.Ask(bounded, a.Record.Clone(), steps)
	if err != nil {
		return unresolved, fmt.Errorf("compensator: resolver of %v: %w", one.Key, err)
	}
	if found.Outcome == idempotency.OutcomeUnknown {
		return unresolved, nil
	}
	for tries := 0; ; tries++ {
		err = c.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.record(ctx, tx, op, &a.Record, found) })
		if !errors.Is(err, idempotency.ErrRowLocked) || tries == rowLockedTries || ctx.Err() != nil {
			break
		}
		// Another replica, or a caller, looks at the key and has its row for a moment.
		time.Sleep(rowLockedPause)
	}
	switch {
	case errors.Is(err, idempotency.ErrLeaseLost):
		return gone, nil
	case err != nil:
		return unresolved, err
	}
	return resolved, nil
}

const (
	rowLockedTries = 20
	rowLockedPause = 10 * time.Millisecond
)

// record writes the business rows of what was found, and the outcome.
func (c *Compensator) record(ctx context.Context, tx pgx.Tx, op idempotency.Operation, r *idempotency.Record, found idempotency.Resolution) error {
	started, err := c.store.LockLease(ctx, tx, r.Owner())
	if err != nil {
		return err
	}
	if err := op.Resolver.Commit(ctx, tx, r.Clone(), found); err != nil {
		return fmt.Errorf("compensator: commit of the resolver of %v: %w", r.Key, err)
	}
	done := &idempotency.Completion{
		Request: idempotency.Request{Key: r.Key, Fingerprint: r.Fingerprint}, Acquired: idempotency.Acquisition{Started: started},
		AttemptToken: r.AttemptToken, State: idempotency.StateSuccess, ResultType: found.ResultType, Result: found.Result,
		Retention: op.Retention, ResultRetention: op.ResultRetention,
	}
	reason := "resolved: it was done"
	if found.Outcome == idempotency.OutcomeFailed {
		done.State, done.ErrorCode, done.ErrorMessage = idempotency.StateFailed, found.Code, found.Message
		reason = "resolved: it was not done"
	}
	return c.store.CompleteLeaseTx(ctx, tx, r, done, c.config.Actor, reason)
}
