package ids

import (
	"strconv"
	"time"
)

// The layout of an ID, from its highest bit: 0, 41 bits of milliseconds since Epoch, 10 bits of worker, 12 bits of sequence.
const (
	timeBits     = 41
	workerBits   = 10
	sequenceBits = 12

	// MaxWorker is the largest worker number; the smallest is 0.
	MaxWorker = 1<<workerBits - 1

	maxTime     = 1<<timeBits - 1
	maxSequence = 1<<sequenceBits - 1
)

// Epoch is 2025-01-01 UTC in Unix milliseconds. The last ID is of 2094. It is a constant for ever: with another one, ids would
// come again.
const Epoch = 1_735_689_600_000

// ID is positive, and larger than every ID of an earlier millisecond, whoever made it. It fits PostgreSQL's bigint. Send it to
// browsers as a string: their numbers have 53 bits.
type ID int64

func makeID(ms int64, worker, sequence int) ID {
	return ID((ms-Epoch)<<(workerBits+sequenceBits) | int64(worker)<<sequenceBits | int64(sequence))
}

// Time is the millisecond of the ID.
func (id ID) Time() time.Time { return time.UnixMilli(id.ms()).UTC() }

func (id ID) ms() int64 { return int64(id)>>(workerBits+sequenceBits) + Epoch }

// Worker is the number of the worker that made the ID.
func (id ID) Worker() int { return int(id>>sequenceBits) & MaxWorker }

// Sequence is the place of the ID among those of its worker and millisecond, from 0.
func (id ID) Sequence() int { return int(id) & maxSequence }

// String is the ID in decimal digits.
func (id ID) String() string { return strconv.FormatInt(int64(id), 10) }
