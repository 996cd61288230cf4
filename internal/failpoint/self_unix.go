//go:build failpoints && unix && !linux

package failpoint

import (
	"os"
	"syscall"
)

func killSelf() {
	signalSelf(syscall.SIGKILL)
	select {} // another thread may be taking it
}

// stopSelf may return a moment before the process stops.
func stopSelf() { signalSelf(syscall.SIGSTOP) }

func signalSelf(signal syscall.Signal) {
	if err := syscall.Kill(os.Getpid(), signal); err != nil {
		panic("failpoint: signal self: " + err.Error())
	}
}
