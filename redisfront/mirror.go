package redisfront

import (
	"context"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// DefaultMirrorLife is how long Redis keeps a state that PostgreSQL has.
const DefaultMirrorLife = time.Hour

// Mirror keeps copies of the states that a table of PostgreSQL has, so that a transition which is certainly refused
// costs PostgreSQL nothing. It decides nothing else.
type Mirror struct {
	front   *Front
	machine *idempotency.Machine
	life    time.Duration
}

// Mirror returns the mirror of a machine's states. life, at least 1 s, is how long a copy is kept; 0 means 1 h. It is also
// how long a state that was set back by hand, past the machine, may be refused what it now allows, unless Forget is called.
func (f *Front) Mirror(m *idempotency.Machine, life time.Duration) (*Mirror, error) {
	life, err := checkStates("Mirror", m, life, DefaultMirrorLife)
	if err != nil {
		return nil, err
	}
	return &Mirror{front: f, machine: m, life: life}, nil
}

// Set notes the state of a row, named by Machine.Key, that COMMIT has confirmed: never earlier. epoch is that of the
// session that committed it, read in its transaction or before, see idempotency.Store.Epoch; without one nothing is noted.
// It does not wait for Redis. A copy that is lost or late does no harm, and an older state does not replace a later one
// where the machine tells which is which.
func (m *Mirror) Set(ctx context.Context, row idempotency.Key, state, epoch string) error {
	if err := checkState(m.machine, row, state); err != nil || epoch == "" {
		return err
	}
	n := m.front.names(row)
	args := []any{epoch, state, milliseconds(m.life)}
	for _, later := range m.machine.States() {
		if m.machine.Leads(state, later) && !m.machine.Leads(later, state) {
			args = append(args, later)
		}
	}
	m.front.add(ctx, job{names: n, command: command{script: scriptMirror, keys: []string{n.mirror()}, args: args}})
	return nil
}

// Refuses returns ErrTransition (*TransitionError) if the row can never come to be moved to the state, ErrInvalid if there
// is no such state, and nil in every other case, also where Redis fails: then ask PostgreSQL. epoch is the one that
// PostgreSQL is in now; a copy of another one is not believed.
//
// A copy may be late, so the row may have gone on since: only what cannot be reached from the copy, by any number of
// transitions, is refused.
func (m *Mirror) Refuses(ctx context.Context, row idempotency.Key, to, epoch string) error {
	if err := checkState(m.machine, row, to); err != nil || epoch == "" {
		return err
	}
	n := m.front.names(row)
	args := []any{epoch, to, 0}
	for _, from := range m.machine.States() {
		if m.machine.Leads(from, to) {
			args = append(args, from)
		}
	}
	r, err := m.front.run(ctx, scriptTransition, n, []string{n.mirror()}, args...)
	if err != nil || r.code != CodeRefused {
		return nil //nolint:nilerr // a front's error is no error of the call; the front has told it
	}
	// A state of another release is one of which nothing is certain.
	if from := string(r.text(1)); m.machine.Knows(from) {
		return m.machine.Refuse(from, to)
	}
	return nil
}

// Forget removes the copy of a row's state, also one that is still on its way to Redis: for whoever changed or deleted
// the row past the machine.
func (m *Mirror) Forget(ctx context.Context, row idempotency.Key) error {
	if err := checkRow(m.machine, row); err != nil {
		return err
	}
	n := m.front.names(row)
	return m.front.evict(ctx, n, n.mirror())
}
