package idempotency

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Limits of a Machine. A state fits a label of an ENUM.
const (
	MaxStates     = 100
	MaxStateBytes = 63
)

// Machine is the states of something the service keeps, an order for example, and the transitions allowed between them:
// declared once, and asked by Guard in PostgreSQL and by redisfront in Redis alike. It never changes, and is safe for
// concurrent use.
type Machine struct {
	name   string
	starts []string
	states []string                   // in the order of their declaration, starts first
	next   map[string][]string        // by where a transition begins
	later  map[string]map[string]bool // what can be reached in one or more transitions
}

// Transition is one allowed step.
type Transition struct{ From, To string }

// NewMachine declares a machine. starts are the states a new row may have; a path is a chain of allowed transitions:
//
//	NewMachine("order", []string{"created"}, []string{"created", "paid", "shipped"}, []string{"paid", "refunded"})
//
// The name is 1 to 128 bytes, a state 1 to 63, of valid UTF-8 without control characters. A transition is declared once,
// and leads to another state: to be where one is already is no transition. Every state can be reached from a start, which
// finds most misspelt ones. Otherwise the error is a *ConfigError.
func NewMachine(name string, starts []string, paths ...[]string) (*Machine, error) {
	m := &Machine{name: name, next: map[string][]string{}, later: map[string]map[string]bool{}}
	if rule := ruleOf(validateOperation(name)); rule != "" {
		return nil, &ConfigError{Field: "Machine: name", Rule: rule}
	}
	if len(starts) == 0 {
		return nil, m.invalid("starts", "must name the states a new row may have")
	}
	for i, state := range starts {
		if err := m.declare(fmt.Sprintf("starts[%d]", i), state); err != nil {
			return nil, err
		}
		if slices.Contains(m.starts, state) {
			return nil, m.invalid(fmt.Sprintf("starts[%d]", i), fmt.Sprintf("must not name %q again", state))
		}
		m.starts = append(m.starts, state)
	}
	for i, path := range paths {
		if err := m.walk(fmt.Sprintf("paths[%d]", i), path); err != nil {
			return nil, err
		}
	}
	if len(m.next) == 0 {
		return nil, m.invalid("paths", "must hold a transition")
	}
	for _, state := range m.states {
		m.later[state] = m.reach(state)
	}
	for _, state := range m.states {
		if !m.fromStart(state) {
			return nil, m.invalid("paths", fmt.Sprintf("must lead from a start to %q, or starts must name it", state))
		}
	}
	return m, nil
}

func (m *Machine) walk(field string, path []string) error {
	if len(path) < 2 {
		return m.invalid(field, "must name two states at least")
	}
	for i, state := range path {
		at := fmt.Sprintf("%s[%d]", field, i)
		if err := m.declare(at, state); err != nil {
			return err
		}
		if i == 0 {
			continue
		}
		switch from := path[i-1]; {
		case from == state:
			return m.invalid(at, fmt.Sprintf("must lead to another state than %q: a repeat is told as one, and needs no transition", state))
		case slices.Contains(m.next[from], state):
			return m.invalid(at, fmt.Sprintf("must not declare %q to %q again", from, state))
		default:
			m.next[from] = append(m.next[from], state)
		}
	}
	return nil
}

func (m *Machine) declare(field, state string) error {
	if rule := ruleOf(validateName("state", state, MaxStateBytes)); rule != "" {
		return m.invalid(field, rule)
	}
	if !slices.Contains(m.states, state) {
		m.states = append(m.states, state)
	}
	if len(m.states) > MaxStates {
		return m.invalid(field, fmt.Sprintf("must be one of at most %d states", MaxStates))
	}
	return nil
}

func (m *Machine) invalid(field, rule string) error {
	return &ConfigError{Field: "Machine " + m.name + ": " + field, Rule: rule}
}

// ruleOf is the rule that a name of the program breaks, if it does.
func ruleOf(err error) string {
	var invalid *InvalidError
	if errors.As(err, &invalid) {
		return invalid.Rule
	}
	return ""
}

func (m *Machine) reach(from string) map[string]bool {
	seen, todo := map[string]bool{}, m.next[from]
	for len(todo) > 0 {
		state := todo[0]
		todo = todo[1:]
		if !seen[state] {
			seen[state] = true
			todo = append(slices.Clone(todo), m.next[state]...)
		}
	}
	return seen
}

func (m *Machine) fromStart(state string) bool {
	return slices.ContainsFunc(m.starts, func(start string) bool { return start == state || m.later[start][state] })
}

// Name is the machine's.
func (m *Machine) Name() string { return m.name }

// States are all of them, the starts first, in the order of their declaration.
func (m *Machine) States() []string { return slices.Clone(m.states) }

// Starts are the states a new row may have.
func (m *Machine) Starts() []string { return slices.Clone(m.starts) }

// Knows reports whether there is such a state.
func (m *Machine) Knows(state string) bool { return slices.Contains(m.states, state) }

// Transitions are all that are allowed, by the state where they begin.
func (m *Machine) Transitions() (all []Transition) {
	for _, from := range m.states {
		for _, to := range m.next[from] {
			all = append(all, Transition{From: from, To: to})
		}
	}
	return all
}

// Next are the states that may follow; there is none after a final state.
func (m *Machine) Next(from string) []string { return slices.Clone(m.next[from]) }

// Previous are the states from which a transition leads there.
func (m *Machine) Previous(to string) (all []string) {
	for _, from := range m.states {
		if m.Allows(from, to) {
			all = append(all, from)
		}
	}
	return all
}

// Allows reports whether one transition leads from the one state to the other.
func (m *Machine) Allows(from, to string) bool { return slices.Contains(m.next[from], to) }

// Leads reports whether one or more transitions do.
func (m *Machine) Leads(from, to string) bool { return m.later[from][to] }

// Key names a row, or whatever else has the machine's states, to those who keep a state outside of its table: its
// operation is the machine's name, its value the row's id, by the rules for keys.
func (m *Machine) Key(tenant, id string) (Key, error) { return NewKey(tenant, m.name, id) }

// Refuse is the answer that no transition leads there: a *TransitionError, or an *InvalidError where there is no such
// state, whoever named it.
func (m *Machine) Refuse(from, to string) error {
	if err := m.check(to); err != nil {
		return err
	}
	return &TransitionError{Machine: m.name, From: from, To: to, Allowed: m.Next(from)}
}

// check does not repeat what it was given: it may come from a client.
func (m *Machine) check(state string) error {
	if m.Knows(state) {
		return nil
	}
	return &InvalidError{Field: "state", Rule: "must be one of " + strings.Join(m.states, ", ")}
}

// Moved is a transition that was made, or was found made.
type Moved struct {
	From string // equals To if Already
	To   string
	// Already is true where the state was there before: nothing was changed, and nothing was wrong. It is the usual answer
	// to a repeat.
	Already bool
}
