package devstack

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// attributes: own process group, so that a Ctrl-C reaches us and not the server under a running test; and a signal
// when the thread that started the server dies, which is how it ends with us even if we are killed.
func attributes(as *syscall.Credential, onParentDeath syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: onParentDeath, Credential: as}
}

func bootAndNamespace() (boot, namespace string) {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // empty if unreadable: then it is so for every run
	namespace, _ = os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(id)), namespace
}

// startOf returns when a process started, in clock ticks since boot; errGone if it is dead, a zombie too.
func startOf(pid int) (string, error) {
	// Not by /proc alone: with hidepid it hides the living processes of other users.
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return "", errGone
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", fmt.Errorf("devstack: look at process %d: %w", pid, err)
	}
	// "pid (name) state ppid ...": the name may hold spaces and parentheses; the start time is field 22.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return "", fmt.Errorf("devstack: look at process %d: unknown form: %s", pid, stat)
	}
	if state := string(fields[0]); state == "Z" || state == "X" {
		return "", errGone
	}
	return string(fields[19]), nil
}

// runsIn reports whether the process is a server program working in or below the folder.
func runsIn(pid int, dir string, programs ...string) bool {
	proc := "/proc/" + strconv.Itoa(pid)
	cwd, err := os.Readlink(filepath.Join(proc, "cwd"))
	if err != nil || (cwd != dir && !strings.HasPrefix(cwd, dir+"/")) {
		return false
	}
	name, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil {
		return false
	}
	for _, program := range programs {
		if strings.TrimSpace(string(name)) == program {
			return true
		}
	}
	return false
}
