package invariant

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Snapshot is where the keys of an operation stand.
type Snapshot struct {
	operation string
	taken     time.Time // PostgreSQL's clock
	keys      map[[2]string]position
}

type position struct {
	state             string
	retryable         bool
	fence, generation int64
	attempt           int32
	token             string // hexadecimal, as fingerprint and result
	fingerprint       string
	result            string // hash of it, empty if there is none
	expires           *time.Time
	resultExpires     *time.Time
}

// Take reads a snapshot.
//
// A test that moves a row's times into the past by hand takes its snapshot after that: else a key that is legally used
// again looks as if it had been used before its time.
func Take(ctx context.Context, db Database, operation string) (s *Snapshot, err error) {
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		s, err = take(ctx, tx, operation)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("invariant: take snapshot: %w", err)
	}
	return s, nil
}

func take(ctx context.Context, tx pgx.Tx, operation string) (*Snapshot, error) {
	s := &Snapshot{operation: operation, keys: map[[2]string]position{}}
	if err := tx.QueryRow(ctx, "SELECT statement_timestamp()").Scan(&s.taken); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `
		SELECT tenant, key, state, retryable, fence, generation, attempt, COALESCE(encode(attempt_token, 'hex'), ''),
		       COALESCE(encode(fingerprint, 'hex'), ''), COALESCE(encode(sha256(result), 'hex'), ''), expires_at, result_expires_at
		FROM idempotency.records WHERE operation = $1`, operation)
	if err != nil {
		return nil, err
	}
	var tenant, key string
	var p position
	_, err = pgx.ForEachRow(rows, []any{
		&tenant, &key, &p.state, &p.retryable, &p.fence, &p.generation, &p.attempt, &p.token, &p.fingerprint, &p.result,
		&p.expires, &p.resultExpires,
	}, func() error {
		s.keys[[2]string{tenant, key}] = p
		return nil
	})
	return s, err
}

// Compare is I4: what a later snapshot shows that cannot have come of this one.
func (s *Snapshot) Compare(after *Snapshot) (violations []Violation) {
	for _, key := range slices.SortedFunc(maps.Keys(s.keys), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		before := s.keys[key]
		now, found := after.keys[key]
		var what string
		if !found {
			what = before.vanished(after.taken)
		} else {
			what = before.becomes(now, after.taken)
		}
		if what != "" {
			violations = append(violations, Violation{Invariant: I4, Tenant: key[0], Key: key[1], What: what})
		}
	}
	return violations
}

// expired: PROCESSING never is.
func (p position) expired(at time.Time) bool {
	return p.state != "PROCESSING" && p.expires != nil && !p.expires.After(at)
}

// final: nothing but the end of its retention changes it.
func (p position) final() bool { return p.state == "SUCCESS" || p.state == "FAILED" && !p.retryable }

func (p position) vanished(at time.Time) string {
	if p.expired(at) {
		return ""
	}
	return fmt.Sprintf("%v is gone and had not expired", p)
}

// becomes returns what is wrong with one position after another, or nothing.
func (p position) becomes(now position, at time.Time) string {
	var wrong string
	switch {
	case now.fence < p.fence:
		wrong = "the fence went back"
	case now.generation < p.generation:
		wrong = "the generation went back"
	case now.generation > now.fence:
		wrong = "the generation is ahead of the fence"
	case now.generation > p.generation:
		wrong = p.bornAgain(now, at)
	case now.fence > p.fence:
		wrong = p.acquiredAgain(now)
	default:
		wrong = p.movedOn(now, at)
	}
	if wrong == "" {
		return ""
	}
	return fmt.Sprintf("%v became %v: %s", p, now, wrong)
}

// bornAgain: a new generation begins with an expired record or an unused token, and with a new fence.
func (p position) bornAgain(now position, at time.Time) string {
	switch {
	case now.generation <= p.fence:
		return "a new generation without a new fence"
	case p.state != "INIT" && !p.expired(at):
		return "a new generation, and the old one had not expired"
	case p.token != "" && now.token == p.token:
		return "a new generation by the old attempt"
	}
	return ""
}

// acquiredAgain: the same generation with a higher fence is a takeover, a rescue or another try, and whatever followed.
func (p position) acquiredAgain(now position) string {
	switch {
	case p.final():
		return "a final record was acquired again"
	case p.state == "INIT":
		return "an unused token was acquired without a new generation"
	case now.state == "INIT":
		return "a record became an unused token"
	case now.attempt < p.attempt:
		return "the attempt went back"
	case now.fingerprint != p.fingerprint:
		return "another request's fingerprint"
	case p.shortened(now):
		return "expires_at went back"
	}
	return ""
}

// movedOn: with one fence there is one attempt, which may complete and no more.
func (p position) movedOn(now position, at time.Time) string {
	switch {
	case now.token != p.token || now.attempt != p.attempt:
		return "another attempt with the same fence"
	case now.fingerprint != p.fingerprint:
		return "another request's fingerprint"
	case p.shortened(now):
		return "expires_at went back"
	case p.state == "PROCESSING":
		if now.state == "INIT" {
			return "a record became an unused token"
		}
		return ""
	case now.state != p.state || now.retryable != p.retryable:
		return "the state machine has no such step"
	case now.result == p.result:
		return ""
	case now.result == "" && p.resultExpires != nil && !p.resultExpires.After(at):
		return "" // dropped
	}
	return "the result changed"
}

// shortened: NULL is for ever.
func (p position) shortened(now position) bool {
	return now.expires != nil && (p.expires == nil || now.expires.Before(*p.expires))
}

// String is a position for people.
func (p position) String() string {
	state := strings.ToLower(p.state)
	if p.retryable {
		state = "retryable " + state
	}
	return fmt.Sprintf("(%s, generation %d, fence %d, attempt %d)", state, p.generation, p.fence, p.attempt)
}
