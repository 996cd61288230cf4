package idempotencymsg

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// Message is one delivery.
type Message struct {
	// Tenant is whose message it is; idempotency.SingleTenant in programs that have one tenant.
	Tenant string
	// ID is the producer's name of the message, the same in every delivery: never the broker's number of a delivery.
	ID string
	// Payload is compared with that of the first delivery, byte for byte.
	Payload []byte
	// Deliveries is how often the broker has delivered it, this time included. Default: not known.
	Deliveries int
}

// Verdict says what became of a message.
type Verdict string

// The verdicts.
const (
	Handled      Verdict = "handled"       // the handler ran, and its writes are committed
	Duplicate    Verdict = "duplicate"     // it was handled before
	DeadLettered Verdict = "dead-lettered" // it was given up, and Config.DeadLetter has it, now or from before
	Failed       Verdict = "failed"        // recorded as failed, by txn.Final or a handler that ended its transaction
	Retry        Verdict = "retry"         // nothing was committed, or nobody knows yet: have it delivered again
	Poisoned     Verdict = "poisoned"      // no delivery will ever handle it, and there is no DeadLetter
)

// Result is what became of one message, and what to tell the broker.
type Result struct {
	Verdict Verdict
	// Reply is what the handler returned, also for a duplicate.
	Reply []byte
	// Err says why for DeadLettered (the first time), Failed, Retry and Poisoned.
	Err error
	// RetryAfter is how long the next delivery should wait, at least; zero: there is no reason to.
	RetryAfter time.Duration
}

// Ack reports whether the broker may forget the message. Otherwise it must be delivered again, or put aside if Poisoned.
func (r Result) Ack() bool { return r.Verdict != Retry && r.Verdict != Poisoned }

// Poison marks a handler's error as one that no delivery will ever cure, such as a payload that does not decode: the
// message is dead-lettered without another try. It returns nil for nil.
func Poison(err error) error {
	if err == nil {
		return nil
	}
	return &poisonError{err}
}

type poisonError struct{ err error }

func (e *poisonError) Error() string { return e.err.Error() }
func (e *poisonError) Unwrap() error { return e.err }

func poisonous(err error) bool {
	var poison *poisonError
	return errors.As(err, &poison)
}

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("idempotencymsg: the handler panicked: %v", e.Value)
}

// deadValue names a message whose own name is no key, or belongs to another payload.
func deadValue(m Message) string {
	h := sha256.New()
	for _, part := range [...][]byte{[]byte(m.Tenant), []byte(m.ID), m.Payload} {
		var length [8]byte
		binary.BigEndian.PutUint64(length[:], uint64(len(part)))
		h.Write(length[:])
		h.Write(part)
	}
	return "dead:" + hex.EncodeToString(h.Sum(nil))
}
