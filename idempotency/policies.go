package idempotency

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Defaults of a PoliciesConfig.
const (
	DefaultPolicyInterval = 5 * time.Second
	DefaultPolicyTimeout  = 5 * time.Second
)

// policyMemory is how long behind the end of a weaker policy every key is guarded, whatever the list of bypassed ones says: a
// call that began under the weaker one may run so long, and a process may read policies so late.
const policyMemory = 15 * time.Minute

// PoliciesConfig configures Policies. A zero field means its default.
type PoliciesConfig struct {
	// Interval is the pause between two reads of Run, with a jitter of a tenth: how late a process obeys, at most.
	// Default: 5 s.
	Interval time.Duration
	// Timeout bounds a read.
	// Default: 5 s.
	Timeout time.Duration
	// OnEvent is told of every policy that changed, PolicyChanged, and so of a kill switch.
	// Default: none.
	OnEvent OnEvent
	// OnReport is told of every read of Run: its error says that policies could not be read, or what this release does not know.
	// Default: none.
	OnReport func(context.Context, PoliciesReport, error)
}

func (c *PoliciesConfig) withDefaults() PoliciesConfig {
	var d PoliciesConfig
	if c != nil {
		d = *c
	}
	if d.Interval == 0 {
		d.Interval = DefaultPolicyInterval
	}
	if d.Timeout == 0 {
		d.Timeout = DefaultPolicyTimeout
	}
	if d.OnEvent == nil {
		d.OnEvent = func(context.Context, Event) {}
	}
	if d.OnReport == nil {
		d.OnReport = func(context.Context, PoliciesReport, error) {}
	}
	return d
}

func (c *PoliciesConfig) validate() error {
	invalid := func(field, rule string) error { return &ConfigError{Field: "PoliciesConfig." + field, Rule: rule} }
	switch {
	case c.Interval < 100*time.Millisecond || c.Interval > time.Minute:
		return invalid("Interval", "must be from 100ms to 1m")
	case c.Timeout < 10*time.Millisecond || c.Timeout > time.Minute:
		return invalid("Timeout", "must be from 10ms to 1m")
	}
	return nil
}

// PoliciesReport is what one read came to.
type PoliciesReport struct {
	Policies int // in force
	Changed  int // of them new, changed or gone since the read before
}

// Policies knows the policies of idempotency.policies, as they were read last. Give one to txn.Config, and run it: without Run,
// or RunOnce, everything is enforced as it is declared, and each new key costs a look at idempotency.bypasses. It is safe for
// concurrent use.
type Policies struct {
	db     DB
	config PoliciesConfig
	known  atomic.Pointer[snapshot] // nil: nothing was read yet
	denied atomic.Bool              // the last read had no right to
	turn   chan struct{}            // holds the read that runs
}

// NewPolicies returns policies of a database, by a pool of the primary. It does not connect.
func NewPolicies(db DB, cfg *PoliciesConfig) (*Policies, error) {
	if db == nil {
		return nil, &ConfigError{Field: "db", Rule: "must not be nil"}
	}
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Policies{db: db, config: config, turn: make(chan struct{}, 1)}, nil
}

// For returns what is in force for a call of this key that begins now. It asks nobody, and waits for nobody.
func (p *Policies) For(key Key) InForce {
	known := p.known.Load()
	if known == nil {
		// A kill switch may have been on a moment ago. But who has no right to look must not fail because of it.
		return InForce{Enforcement: EnforcementEnforce, Guarded: !p.denied.Load()}
	}
	return known.inForce(key)
}

// List returns the policies in force.
func (p *Policies) List() []Policy {
	known := p.known.Load()
	if known == nil {
		return nil
	}
	all := known.list()
	copies := make([]Policy, len(all))
	for i := range all {
		copies[i] = *all[i]
	}
	return copies
}

// Run reads the policies again and again until ctx ends. Errors do not end it; OnReport is told, and what was read last stays in
// force.
func (p *Policies) Run(ctx context.Context) {
	for ctx.Err() == nil {
		report, err := p.RunOnce(ctx)
		if ctx.Err() != nil {
			return // a read that was cut off says nothing
		}
		p.config.OnReport(ctx, report, err)
		every := p.config.Interval
		timer := time.NewTimer(every*9/10 + rand.N(every/5)) // processes that were started together must not come together for ever
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// RunOnce reads the policies once, by one statement, and puts them in force. ErrNewerPolicy: they are in force, but something
// of them is not known to this release, and is taken for enforce. Any other error, ErrReadOnly for a standby: what was read
// before stays in force.
func (p *Policies) RunOnce(ctx context.Context) (PoliciesReport, error) {
	select {
	case p.turn <- struct{}{}: // an older read must not overwrite a younger one
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return PoliciesReport{}, context.Cause(ctx)
	}
	bounded, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()
	read, doubts, err := readAll(bounded, p.db)
	p.denied.Store(denied(err))
	if err != nil {
		return PoliciesReport{}, err
	}
	before := p.known.Swap(read)
	return p.tell(ctx, before, read), doubts
}

func readAll(ctx context.Context, db DB) (s *snapshot, doubts, err error) {
	rows, err := dbsqlc.New(db).PolicyList(ctx, policyMemory.Microseconds())
	if err != nil {
		return nil, nil, fmt.Errorf("idempotency: read policies: %w", translate(readOnly(err)))
	}
	s, doubts = readPolicies(rows)
	return s, doubts, nil
}

// tell fires an event for every policy that is not as it was.
func (p *Policies) tell(ctx context.Context, before, after *snapshot) PoliciesReport {
	if before == nil {
		before = &snapshot{}
	}
	now := after.list()
	report := PoliciesReport{Policies: len(now)}
	old := map[string]*Policy{}
	for _, one := range before.list() {
		old[string(one.Scope)+" "+one.Name] = one
	}
	for _, one := range now {
		id := string(one.Scope) + " " + one.Name
		if was := old[id]; was == nil || was.Change != one.Change {
			report.Changed++
			p.config.OnEvent(ctx, PolicyChanged{Policy: *one})
		}
		delete(old, id)
	}
	for _, gone := range old {
		report.Changed++
		p.config.OnEvent(ctx, PolicyChanged{Policy: *gone, Removed: true})
	}
	return report
}
