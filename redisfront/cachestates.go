package redisfront

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// DefaultCacheLife is how long Redis keeps the states that it alone has.
const DefaultCacheLife = 7 * 24 * time.Hour

// CacheStates keeps a machine's states in Redis ALONE: the strategy CACHE, for effects that may be lost. Eviction, a
// restart or a failover of Redis can forget a state, or the last moves of it. What must not be lost belongs into a table
// of PostgreSQL, behind an idempotency.Guard, with a Mirror here if one is wanted.
type CacheStates struct {
	front   *Front
	machine *idempotency.Machine
	life    time.Duration
}

// CacheStates returns the states of a machine in Redis. life, at least 1 s, is how long a state is kept after its last
// move, and how long the id of a transition is remembered; 0 means 7 days, and none is kept for ever.
func (f *Front) CacheStates(m *idempotency.Machine, life time.Duration) (*CacheStates, error) {
	life, err := checkStates("CacheStates", m, life, DefaultCacheLife)
	if err != nil {
		return nil, err
	}
	return &CacheStates{front: f, machine: m, life: life}, nil
}

func checkStates(of string, m *idempotency.Machine, life, usual time.Duration) (time.Duration, error) {
	switch {
	case m == nil:
		return 0, &idempotency.ConfigError{Field: "redisfront." + of + ": machine", Rule: "must not be nil"}
	case life == 0:
		return usual, nil
	case life < time.Second:
		return 0, &idempotency.ConfigError{Field: "redisfront." + of + ": life", Rule: "must be at least 1s, or 0 for the default: nothing in Redis is kept for ever"}
	}
	return life, nil
}

// Move moves a row, named by Machine.Key, to a state; to one of the machine's starts where nothing is known of it. id
// tells this transition from all others of the row, by the rules for keys: sent again it gets the same answer, errors
// included, and changes nothing, for as long as it is remembered. Of concurrent callers with ids of their own exactly one
// moves; the others are told that the row is there Already.
//
// It returns ErrTransition where no transition leads there, ErrNotFound where nothing is known of the row (the id is not
// used up then), ErrMismatch where the id was used for another state, ErrInvalid where there is no such state or the id
// breaks a rule, and *Error where Redis did not serve the call: it may have moved the row all the same, so send the same
// id again.
func (s *CacheStates) Move(ctx context.Context, row idempotency.Key, id, to string) (idempotency.Moved, error) {
	var none idempotency.Moved
	if err := checkState(s.machine, row, to); err != nil {
		return none, err
	}
	if err := checkID(row, id); err != nil {
		return none, err
	}
	n := s.front.names(row)
	args := []any{"", to, milliseconds(s.life)}
	for _, from := range s.machine.Previous(to) {
		args = append(args, from)
	}
	for _, start := range s.machine.Starts() {
		if start == to {
			args = append(args, "")
		}
	}
	r, err := s.front.run(ctx, scriptTransition, n, []string{n.state(), n.moved(id)}, args...)
	if err != nil {
		return none, err
	}
	there := string(r.text(1))
	switch r.code {
	case CodeOK:
		return idempotency.Moved{From: there, To: to}, nil
	case CodeSame:
		return idempotency.Moved{From: to, To: to, Already: true}, nil
	case CodeRefused:
		return none, s.machine.Refuse(there, to)
	case CodeMiss:
		return none, fmt.Errorf("%w (%s)", idempotency.ErrNotFound, s.machine.Name())
	case CodeMismatch:
		return none, fmt.Errorf("%w: the transition's id was used to move to %.63q", idempotency.ErrMismatch, there)
	}
	return none, &Error{Script: scriptTransition.name, Code: CodeInvalid, Err: fmt.Errorf("replied %v", r.code)}
}

// checkRow refuses the key of something else than the machine's rows.
func checkRow(m *idempotency.Machine, row idempotency.Key) error {
	if row.Operation() != m.Name() {
		return &idempotency.ConfigError{Field: "redisfront: row", Rule: "must be a key made by Key of machine " + m.Name()}
	}
	return nil
}

// checkState refuses a state that the machine does not have, too.
func checkState(m *idempotency.Machine, row idempotency.Key, state string) error {
	if err := checkRow(m, row); err != nil {
		return err
	}
	if !m.Knows(state) {
		return m.Refuse("", state)
	}
	return nil
}

// checkID holds an id to the rules for keys.
func checkID(row idempotency.Key, id string) error {
	_, err := idempotency.NewKey(row.Tenant(), row.Operation(), id)
	var invalid *idempotency.InvalidError
	if errors.As(err, &invalid) {
		return &idempotency.InvalidError{Field: "transition id", Rule: invalid.Rule}
	}
	return err
}
