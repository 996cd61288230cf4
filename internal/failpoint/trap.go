package failpoint

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Variable is the environment variable with a process's traps, as Env writes it.
const Variable = "PGONCE_FAILPOINTS"

// ErrNotBuilt means that the program was built without the tag failpoints.
var ErrNotBuilt = errors.New("failpoint: not in this build: go test -tags failpoints")

// Action is what a trap does.
type Action string

// The actions.
const (
	Kill  Action = "kill"  // SIGKILL to this process
	Stop  Action = "stop"  // SIGSTOP to this process, until somebody sends SIGCONT
	Sleep Action = "sleep" // for Trap.For
	Panic Action = "panic" // in the goroutine that is there
)

// Trap is an action at a point. It springs once.
type Trap struct {
	At Point
	Do Action

	// Hit is the number of the hit that springs it.
	// Default: 1, the first.
	Hit int

	// For is how long Sleep sleeps.
	For time.Duration
}

// String is the trap in the environment variable: "commit.sent=kill@3", "acquire.after=sleep:200ms@1".
func (t Trap) String() string {
	action := string(t.Do)
	if t.Do == Sleep {
		action += ":" + t.For.String()
	}
	return fmt.Sprintf("%s=%s@%d", t.At, action, max(t.Hit, 1))
}

// Env is the entry that sets traps in a child's environment.
func Env(traps ...Trap) string {
	texts := make([]string, len(traps))
	for i, t := range traps {
		texts[i] = t.String()
	}
	return Variable + "=" + strings.Join(texts, ";")
}

// parse reads what Env wrote behind the "=".
func parse(text string) ([]Trap, error) {
	var traps []Trap
	for item := range strings.SplitSeq(text, ";") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		point, rest, _ := strings.Cut(item, "=")
		action, hit, numbered := strings.Cut(rest, "@")
		action, duration, _ := strings.Cut(action, ":")
		t := Trap{At: Point(point), Do: Action(action)}
		var err error
		if numbered {
			t.Hit, err = strconv.Atoi(hit)
		}
		if err == nil && t.Do == Sleep {
			t.For, err = time.ParseDuration(duration)
		}
		if err == nil {
			err = t.validate()
		}
		if err != nil {
			return nil, fmt.Errorf("failpoint: %s: %q: %w", Variable, item, err)
		}
		traps = append(traps, t)
	}
	return traps, nil
}

func (t Trap) validate() error {
	switch {
	case !slices.Contains(all, t.At):
		return fmt.Errorf("there is no point %q", t.At)
	case !slices.Contains([]Action{Kill, Stop, Sleep, Panic}, t.Do):
		return fmt.Errorf("there is no action %q", t.Do)
	case t.Hit < 0:
		return errors.New("hits are counted from 1")
	case t.Do == Sleep && t.For <= 0:
		return errors.New("sleep needs a time, for example sleep:200ms")
	}
	return nil
}
