//go:build !linux

package devstack

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// childrenOf lists the processes that a process has started. PostgreSQL's have sessions of their own, so that no signal to
// a group reaches them.
func childrenOf(parent int) (children []int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-axo", "pid=,ppid=").Output()
	if err != nil {
		return nil, fmt.Errorf("devstack: list processes: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) == 2 && fields[1] == strconv.Itoa(parent) {
			pid, err := strconv.Atoi(fields[0])
			if err == nil {
				children = append(children, pid)
			}
		}
	}
	return children, nil
}

// suspended reports whether a process has obeyed SIGSTOP, or is dead.
func suspended(pid int) bool {
	state := ps(pid, "stat=")
	return state == "" || strings.ContainsAny(state[:1], "TZ")
}
