package devstack

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// childrenOf lists the processes that a process has started and not yet buried. PostgreSQL's have sessions of their own,
// so that no signal to a group reaches them.
func childrenOf(parent int) (children []int, err error) {
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("devstack: list processes: %w", err)
	}
	for _, entry := range all {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if fields := statOf(pid); len(fields) > 1 && string(fields[1]) == strconv.Itoa(parent) {
			children = append(children, pid)
		}
	}
	return children, nil
}

// suspended reports whether a process has obeyed SIGSTOP, or is dead.
func suspended(pid int) bool {
	fields := statOf(pid)
	return len(fields) == 0 || bytes.ContainsAny(fields[0], "TtZX")
}

// statOf returns what /proc says of a process from its state on: "pid (name) state ppid ...".
func statOf(pid int) [][]byte {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil
	}
	return bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
}
