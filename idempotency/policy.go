package idempotency

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Enforcement says what becomes of a key that was used before.
type Enforcement string

// The enforcements.
const (
	EnforcementEnforce Enforcement = "enforce" // once per key
	EnforcementShadow  Enforcement = "shadow"  // the first outcome is recorded, later calls are executed and logged
	EnforcementOff     Enforcement = "off"     // records that exist are replayed, none is written, executions are logged
)

// Scope says which operations a policy is for.
type Scope string

// The scopes, the narrowest first. The narrowest policy counts as a whole; of several prefixes the longest.
const (
	ScopeOperation Scope = "operation" // the one of this name
	ScopePrefix    Scope = "prefix"    // all whose names begin so
	ScopeAll       Scope = "all"       // every one
)

// MaxPolicyWait is the longest Wait that a policy may ask for.
const MaxPolicyWait = 5 * time.Minute

// Policy is a row of idempotency.policies: what running processes do with the keys of some operations.
type Policy struct {
	Scope       Scope
	Name        string // of the operation, or its beginning; empty for ScopeAll
	Enforcement Enforcement
	// Percentage is the share of keys, by their hash, that is enforced under EnforcementEnforce; the others are in shadow.
	Percentage int
	// Strategy is StrategyStrict or StrategyHybrid; empty: as declared. Only where one of the two is declared, and HYBRID only in a
	// runner with fronts.
	Strategy Strategy
	// Local says whether outcomes are kept in the process's memory; nil: as declared.
	Local *bool
	// Wait is how long a duplicate waits, 0: not at all; nil: as declared.
	Wait *time.Duration
	Blame
	ChangedAt time.Time
	// Change is its number in idempotency.policy_changes.
	Change int64
}

// String names the policy's operations: order.create, order.*, or *.
func (p *Policy) String() string {
	switch p.Scope {
	case ScopeAll:
		return "*"
	case ScopePrefix:
		return p.Name + "*"
	}
	return p.Name
}

// Validate checks what can be checked without a database.
func (p *Policy) Validate() error {
	invalid := func(field, rule string) error { return &InvalidError{Field: field, Rule: rule} }
	switch p.Scope {
	case ScopeAll:
		if p.Name != "" {
			return invalid("policy's name", "must be empty where it is for all")
		}
	case ScopeOperation, ScopePrefix:
		if err := validateOperation(p.Name); err != nil {
			return err
		}
	default:
		return invalid("policy's scope", "must be operation, prefix or all")
	}
	switch p.Enforcement {
	case EnforcementEnforce, EnforcementShadow, EnforcementOff:
	default:
		return invalid("enforcement", "must be off, shadow or enforce")
	}
	switch {
	case p.Percentage < 0 || p.Percentage > 100:
		return invalid("percentage", "must be from 0 to 100")
	case p.Percentage != 100 && p.Enforcement != EnforcementEnforce:
		return invalid("percentage", "must be 100 where nothing is enforced")
	case p.Strategy != "" && p.Strategy != StrategyStrict && p.Strategy != StrategyHybrid:
		return invalid("strategy", "must be STRICT or HYBRID: a policy cannot take an operation out of PostgreSQL")
	case p.Wait != nil && (*p.Wait < 0 || *p.Wait > MaxPolicyWait):
		return invalid("wait", fmt.Sprintf("must be from 0 to %v", MaxPolicyWait))
	}
	return p.Blame.Validate()
}

// InForce is what counts for one call, from its begin to its end.
type InForce struct {
	Enforcement Enforcement
	Strategy    Strategy // empty: as declared
	Local       *bool
	Wait        *time.Duration
	// Change is the policy's number in idempotency.policy_changes; 0: there is none.
	Change int64
	// Guarded says that this operation's keys may have been executed without a record: idempotency.bypasses is asked before one
	// that has no record runs.
	Guarded bool
}

// snapshot is what was read at one time. It is never changed.
type snapshot struct {
	exact    map[string]*Policy
	prefixes []*Policy // the longest first
	all      *Policy
	guarded  []guardedName
}

type guardedName struct {
	scope Scope
	name  string
}

func (g guardedName) covers(operation string) bool {
	switch g.scope {
	case ScopeAll:
		return true
	case ScopePrefix:
		return strings.HasPrefix(operation, g.name)
	}
	return operation == g.name
}

// of is the policy of an operation, or nil.
func (s *snapshot) of(operation string) *Policy {
	if p := s.exact[operation]; p != nil {
		return p
	}
	for _, p := range s.prefixes {
		if strings.HasPrefix(operation, p.Name) {
			return p
		}
	}
	return s.all
}

func (s *snapshot) inForce(key Key) InForce {
	f := InForce{Enforcement: EnforcementEnforce}
	for _, g := range s.guarded {
		f.Guarded = f.Guarded || g.covers(key.operation)
	}
	p := s.of(key.operation)
	if p == nil {
		return f
	}
	f.Enforcement, f.Strategy, f.Local, f.Wait, f.Change = p.Enforcement, p.Strategy, p.Local, p.Wait, p.Change
	if f.Enforcement == EnforcementEnforce && !p.enforces(key) {
		f.Enforcement = EnforcementShadow
	}
	return f
}

// enforces reports whether the key is of the share that is enforced. By its hash: every call of a key is on the same side, in
// every process, and who was enforced at 5 % is so at 100 %.
func (p *Policy) enforces(key Key) bool {
	switch p.Percentage {
	case 100:
		return true
	case 0:
		return false
	}
	return uint64(key.LockID())%100 < uint64(p.Percentage) //nolint:gosec // any bits will do, and a share is positive
}

// all lists the policies, the narrowest last.
func (s *snapshot) list() (all []*Policy) {
	if s.all != nil {
		all = append(all, s.all)
	}
	for _, p := range s.exact {
		all = append(all, p)
	}
	all = append(all, s.prefixes...)
	slices.SortFunc(all, func(a, b *Policy) int { return cmp.Or(cmp.Compare(a.Scope, b.Scope), cmp.Compare(a.Name, b.Name)) })
	return all
}

// read makes a snapshot of rows. What a row says that this release does not know is taken for the safe side, never for the weak
// one, and is part of the error.
func readPolicies(rows []dbsqlc.PolicyListRow) (*snapshot, error) {
	s := &snapshot{exact: map[string]*Policy{}}
	var unknown []error
	for i := range rows {
		row := &rows[i]
		if row.Guarded {
			s.guarded = append(s.guarded, guardedName{Scope(row.Scope), row.Name})
			continue
		}
		p, err := readPolicy(row)
		if err != nil {
			unknown = append(unknown, err)
		}
		switch p.Scope {
		case ScopeOperation:
			s.exact[p.Name] = p
		case ScopePrefix:
			s.prefixes = append(s.prefixes, p)
		case ScopeAll:
			s.all = p
		}
	}
	slices.SortFunc(s.prefixes, func(a, b *Policy) int { return cmp.Or(len(b.Name)-len(a.Name), cmp.Compare(a.Name, b.Name)) })
	return s, errors.Join(unknown...)
}

func readPolicy(row *dbsqlc.PolicyListRow) (*Policy, error) {
	p := &Policy{
		Scope: Scope(row.Scope), Name: row.Name, Enforcement: Enforcement(row.Enforcement), Percentage: int(row.Percentage),
		Strategy: Strategy(textOf(row.Strategy)), Local: row.LocalFront, Blame: Blame{Actor: textOf(row.Actor), Reason: textOf(row.Reason)},
		ChangedAt: row.ChangedAt.UTC(), Change: row.Change,
	}
	if row.WaitUs >= 0 {
		wait := time.Duration(row.WaitUs) * time.Microsecond
		p.Wait = &wait
	}
	var unknown []error
	doubt := func(what string, value any, instead string) {
		unknown = append(unknown, fmt.Errorf("%w: policy of %v has the %s %.64q: %s; update this program", ErrNewerPolicy, p, what, fmt.Sprint(value), instead))
	}
	switch p.Scope {
	case ScopeOperation, ScopePrefix, ScopeAll:
	default:
		doubt("scope", p.Scope, "it is not obeyed")
	}
	switch p.Enforcement {
	case EnforcementEnforce, EnforcementShadow, EnforcementOff:
	default:
		doubt("enforcement", p.Enforcement, "all is enforced")
		p.Enforcement, p.Percentage = EnforcementEnforce, 100
	}
	if p.Percentage < 0 || p.Percentage > 100 {
		doubt("percentage", p.Percentage, "all is enforced")
		p.Percentage = 100
	}
	if p.Strategy != "" && p.Strategy != StrategyStrict && p.Strategy != StrategyHybrid {
		doubt("strategy", p.Strategy, "it is as declared")
		p.Strategy = ""
	}
	if p.Wait != nil && *p.Wait > MaxPolicyWait {
		doubt("wait", *p.Wait, "it is as declared")
		p.Wait = nil
	}
	return p, errors.Join(unknown...)
}
