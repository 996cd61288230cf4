package childtest

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// attributes make the kernel kill the child when the thread that started it dies, even if this process is killed. The
// child is in a process group of its own: a Ctrl-C reaches the test, which then decides.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }

// stopped asks for the state of the whole process: /proc shows it when its last thread has stopped.
func stopped(pid int) bool {
	tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return false
	}
	for _, task := range tasks {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + task.Name() + "/stat")
		if err != nil {
			return false
		}
		// "pid (name) state ...": the name may hold spaces and parentheses.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) == 0 || string(fields[0]) != "T" {
			return false
		}
	}
	return len(tasks) > 0
}
