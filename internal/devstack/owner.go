package devstack

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// ownerFile names, in a folder of ours, the process it belongs to.
const ownerFile = "owner"

// errGone means that there is no such process, as opposed to one we may not look at.
var errGone = errors.New("devstack: no such process")

// owner is a process, told apart from a later one with the same number, and from one of another machine or container.
type owner struct {
	Host      string `json:"host"`
	Boot      string `json:"boot,omitempty"`
	Namespace string `json:"ns,omitempty"`
	PID       int    `json:"pid"`
	Start     string `json:"start"`
}

func thisOwner() (owner, error) {
	host, err := os.Hostname()
	if err != nil {
		return owner{}, fmt.Errorf("devstack: name this host: %w", err)
	}
	o := owner{Host: host, PID: os.Getpid()}
	o.Boot, o.Namespace = bootAndNamespace()
	if o.Start, err = startOf(o.PID); err != nil {
		return owner{}, err
	}
	return o, nil
}

func (o owner) String() string {
	text, _ := json.Marshal(o) // strings and a number: no error is possible
	return string(text)
}

func parseOwner(text []byte) (owner, error) {
	var o owner
	if err := json.Unmarshal(text, &o); err != nil {
		return owner{}, fmt.Errorf("devstack: read owner: %w", err)
	}
	if o.PID <= 0 || o.Start == "" || o.Host == "" {
		return owner{}, fmt.Errorf("devstack: read owner: incomplete: %s", text)
	}
	return o, nil
}

// provablyDead reports whether the owner was a process we would see, and it is gone. A process of another host, boot
// or pid namespace (a container) may well be alive: its things are left alone.
func (o owner) provablyDead() bool {
	me, err := thisOwner()
	if err != nil || o.Host != me.Host || o.Boot != me.Boot || o.Namespace != me.Namespace {
		return false
	}
	started, err := startOf(o.PID)
	return errors.Is(err, errGone) || err == nil && started != o.Start
}
