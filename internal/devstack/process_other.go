//go:build !linux

package devstack

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// attributes: only Linux can signal a process when its parent dies. Elsewhere a server of a killed run goes on until
// the next Start sweeps it.
func attributes(as *syscall.Credential, _ syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: as}
}

func bootAndNamespace() (boot, namespace string) { return "", "" }

// startOf returns when a process started, as ps says it; errGone if it is dead.
func startOf(pid int) (string, error) {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return "", errGone
	}
	if start := ps(pid, "lstart="); start != "" {
		return start, nil
	}
	return "", fmt.Errorf("devstack: look at process %d: ps says nothing", pid)
}

// runsIn reports whether the process is a server program that was given the folder.
func runsIn(pid int, dir string, programs ...string) bool {
	command := ps(pid, "command=")
	if !strings.Contains(command, dir) {
		return false
	}
	for _, program := range programs {
		if strings.Contains(command, program) {
			return true
		}
	}
	return false
}

func ps(pid int, column string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-o", column, "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
