//go:build failpoints

package failpoint

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"
)

// Enabled reports whether this build has failpoints.
const Enabled = true

var (
	mu   sync.Mutex
	set  []Trap
	hits = map[Point]int{}
)

// A process whose traps cannot be read must not run without them.
func init() {
	traps, err := parse(os.Getenv(Variable))
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	set = traps
}

// Arm sets the process's traps in the place of those that are set, and counts hits from zero. Without traps it disarms.
// Traps belong to the process: tests that arm do not run in parallel.
func Arm(traps ...Trap) error {
	for _, t := range traps {
		if err := t.validate(); err != nil {
			return fmt.Errorf("failpoint: arm: %w", err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	set, hits = slices.Clone(traps), map[Point]int{}
	return nil
}

// Hits returns how often each point was reached since the last Arm, or since the process's start.
func Hits() map[Point]int {
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(hits)
}

// Hit says that the code has come to a point. It panics at a point that All does not know.
func Hit(at Point) {
	if !slices.Contains(all, at) {
		panic(fmt.Sprintf("failpoint: %q is not in All", at))
	}
	for _, t := range sprung(at) {
		t.spring()
	}
}

// sprung counts a hit and returns the traps it springs.
func sprung(at Point) (traps []Trap) {
	mu.Lock()
	defer mu.Unlock()
	hits[at]++
	for _, t := range set {
		if t.At == at && max(t.Hit, 1) == hits[at] {
			traps = append(traps, t)
		}
	}
	return traps
}

func (t Trap) spring() {
	switch t.Do {
	case Kill:
		killSelf()
	case Stop:
		stopSelf()
	case Sleep:
		time.Sleep(t.For)
	case Panic:
		panic(fmt.Sprintf("failpoint: %v", t))
	}
}
