package compensator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

const (
	// healPage is how many keys are asked about in one statement.
	healPage = 500
	// maxSuspects bounds the marks that one pass looks at twice.
	maxSuspects = 10_000
	// markGrace is the time from a caller's mark to its lock in PostgreSQL, and from its commit to the end of its mark.
	markGrace = time.Second
	// publishGrace is the time from a commit to its entry.
	publishGrace = 5 * time.Second
	// lifeSlack is what an entry may live longer than PostgreSQL's clock says: the look at both is not one moment.
	lifeSlack = 5 * time.Second
)

// healer is one front and where the pass before ended.
type healer struct {
	*Compensator
	front   idempotency.Auditable
	scanner idempotency.Scanner
	until   time.Time // outcomes recorded until then are there
}

// healable are the operations whose outcomes fronts keep.
func (c *Compensator) healable() (operations []idempotency.Operation) {
	for _, op := range c.operations {
		if op.Strategy == "" || op.Strategy == idempotency.StrategyHybrid {
			operations = append(operations, op)
		}
	}
	return operations
}

// newHealers begins with all fronts at their beginning.
func (c *Compensator) newHealers() {
	var names []string
	for _, op := range c.healable() {
		names = append(names, op.Name)
	}
	for _, front := range c.config.Fronts {
		c.healers = append(c.healers, &healer{Compensator: c, front: front, scanner: front.Scan(names)})
	}
}

// heal makes the fronts agree with PostgreSQL. It only ever changes the fronts.
func (c *Compensator) heal(ctx context.Context, now time.Time, report *Report) error {
	var errs []error
	for _, h := range c.healers {
		if err := errors.Join(h.kept(ctx, report), h.missing(ctx, now, report)); err != nil {
			errs = append(errs, fmt.Errorf("compensator: heal front %s: %w", h.front.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// kept holds what the front keeps against PostgreSQL. A front that is larger than one pass may be is gone through in several.
func (h *healer) kept(ctx context.Context, report *Report) error {
	var marks []idempotency.Kept
	for looked, done := 0, false; !done && looked < h.config.HealLimit; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var page []idempotency.Kept
		var err error
		page, done, err = h.scanner.Next(context.WithoutCancel(ctx))
		if err != nil {
			return err
		}
		looked += max(len(page), healPage) // also at what others keep there
		report.Examined += len(page)
		entries := page[:0]
		for _, k := range page {
			switch {
			case !k.Mark || k.Unreadable:
				entries = append(entries, k)
			case len(marks) < maxSuspects:
				marks = append(marks, k)
			}
		}
		if err := h.entries(ctx, entries, report); err != nil {
			return err
		}
	}
	return h.marks(ctx, marks, report)
}

// entries heals a page.
func (h *healer) entries(ctx context.Context, page []idempotency.Kept, report *Report) error {
	for part := range slices.Chunk(page, healPage) {
		var keys []idempotency.Key
		for _, k := range part {
			if !k.Unreadable {
				keys = append(keys, k.Record.Key)
			}
		}
		snap, err := h.read(ctx, keys)
		if err != nil {
			return err
		}
		var wrong []idempotency.Kept
		var right []idempotency.Record
		for _, k := range part {
			r, found := snap.Records[k.Record.Key]
			kind, detail := judge(&k, &r, found && !k.Unreadable, snap)
			if kind == "" {
				continue
			}
			heal := !k.Unreadable || k.Foreign || k.Life < 0 // the rest is of another release or sealer, or ends by itself
			h.found(ctx, report, Drift{Kind: kind, Key: k.Record.Key, Name: k.Name, Detail: detail, Healed: heal})
			if !heal {
				continue
			}
			wrong = append(wrong, k)
			if found && publishable(&r, snap.Now) {
				right = append(right, r)
			}
		}
		if err := h.replace(ctx, wrong, right, snap, report); err != nil {
			return err
		}
	}
	return nil
}

// replace removes what is wrong, then publishes what is right: an entry that somebody has replaced meanwhile stays.
func (h *healer) replace(
	ctx context.Context, wrong []idempotency.Kept, right []idempotency.Record, snap idempotency.Snapshot, report *Report,
) error {
	if h.config.DryRun || len(wrong)+len(right) == 0 {
		return nil
	}
	detached := context.WithoutCancel(ctx) // a page that is begun is finished
	removed, err := h.front.Discard(detached, wrong)
	report.Discarded += removed
	if err != nil {
		return err
	}
	for _, r := range right {
		h.front.Publish(detached, idempotency.Entry{Record: r, Epoch: snap.Epoch, Life: r.Life(snap.Now)})
	}
	report.Published += len(right)
	bounded, cancel := context.WithTimeout(detached, h.config.Timeout)
	defer cancel()
	return h.front.Flush(bounded)
}

// marks ends those whose owner is gone. Only what is seen twice counts: a caller marks its key before it asks PostgreSQL, and
// ends the mark after its commit. A mark that is taken away wrongly costs a duplicate its wait, nothing else.
func (h *healer) marks(ctx context.Context, all []idempotency.Kept, report *Report) error {
	suspects, err := h.unowned(ctx, all)
	if err != nil || len(suspects) == 0 {
		return err
	}
	timer := time.NewTimer(markGrace)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	again, err := h.front.Reinspect(context.WithoutCancel(ctx), suspects)
	if err != nil {
		return err
	}
	var same []idempotency.Kept
	for i, k := range again {
		if k.Name != "" && slices.Equal(k.Content, suspects[i].Content) {
			same = append(same, k)
		}
	}
	if same, err = h.unowned(ctx, same); err != nil {
		return err
	}
	for _, k := range same {
		detail := "nobody holds the key in PostgreSQL"
		if k.Life < 0 {
			detail += ", and it would stay for ever"
		}
		h.found(ctx, report, Drift{Kind: DriftNoOwner, Name: k.Name, Detail: detail, Healed: true})
	}
	return h.replace(ctx, same, nil, idempotency.Snapshot{}, report)
}

// unowned returns the marks of keys that nobody runs.
func (h *healer) unowned(ctx context.Context, marks []idempotency.Kept) (unowned []idempotency.Kept, err error) {
	for part := range slices.Chunk(marks, healPage) {
		ids := make([]int64, len(part))
		for i, k := range part {
			ids[i] = k.LockID
		}
		var running map[int64]bool
		err := h.call(ctx, func(ctx context.Context) (err error) {
			running, err = h.store.Running(ctx, h.pool, ids)
			return err
		})
		if err != nil {
			return nil, err
		}
		for _, k := range part {
			if !running[k.LockID] {
				unowned = append(unowned, k)
			}
		}
	}
	return unowned, nil
}

// missing publishes what was committed since the pass before, or in the time of Lookback, and did not get to the front.
func (h *healer) missing(ctx context.Context, now time.Time, report *Report) error {
	until := now.Add(-publishGrace)
	since := now.Add(-h.config.Lookback)
	if h.until.After(since) {
		since = h.until
	}
	if !until.After(since) {
		return nil
	}
	byRetention := map[time.Duration][]string{}
	for _, op := range h.healable() {
		if op.Retention > 0 {
			byRetention[op.Retention] = append(byRetention[op.Retention], op.Name)
		}
	}
	for retention, operations := range byRetention {
		span := idempotency.Span{Since: since, Until: until, Operations: operations, Retention: retention}
		if err := h.missingOf(ctx, span, report); err != nil {
			return err
		}
	}
	if !h.config.DryRun {
		h.until = until
	}
	return nil
}

func (h *healer) missingOf(ctx context.Context, span idempotency.Span, report *Report) error {
	var last *idempotency.SpanMark
	for {
		var page []idempotency.SpanMark
		err := h.call(ctx, func(ctx context.Context) (err error) {
			page, err = h.store.ListOutcomes(ctx, h.pool, span, last, healPage)
			return err
		})
		if err != nil {
			return err
		}
		if err := h.missingPage(ctx, page, report); err != nil {
			return err
		}
		if len(page) < healPage {
			return nil
		}
		last = &page[len(page)-1]
	}
}

func (h *healer) missingPage(ctx context.Context, page []idempotency.SpanMark, report *Report) error {
	if len(page) == 0 {
		return nil
	}
	keys := make([]idempotency.Key, len(page))
	for i, one := range page {
		keys[i] = one.Key
	}
	kept, err := h.front.Inspect(context.WithoutCancel(ctx), keys)
	if err != nil {
		return err
	}
	report.Examined += len(kept)
	var absent []idempotency.Key
	for i, k := range kept {
		if k.Name == "" {
			absent = append(absent, keys[i])
		}
	}
	if len(absent) == 0 {
		return nil
	}
	snap, err := h.read(ctx, absent)
	if err != nil {
		return err
	}
	var right []idempotency.Record
	for _, key := range absent {
		if r, found := snap.Records[key]; found && publishable(&r, snap.Now) {
			h.found(ctx, report, Drift{Kind: DriftMissing, Key: key, Detail: "recorded " + r.CompletedAt.Format(time.RFC3339), Healed: true})
			right = append(right, r)
		}
	}
	return h.replace(ctx, nil, right, snap, report)
}

func (h *healer) read(ctx context.Context, keys []idempotency.Key) (snap idempotency.Snapshot, err error) {
	if len(keys) == 0 {
		return snap, nil
	}
	err = h.call(ctx, func(ctx context.Context) (err error) {
		snap, err = h.store.ReadMany(ctx, h.pool, keys)
		return err
	})
	return snap, err
}

// found counts a difference and tells of it.
func (h *healer) found(ctx context.Context, report *Report, d Drift) {
	d.Front, d.Healed = h.front.Name(), d.Healed && !h.config.DryRun
	*report.drift(d.Kind)++
	h.config.OnDrift(ctx, d)
}
