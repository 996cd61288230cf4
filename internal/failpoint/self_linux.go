//go:build failpoints

package failpoint

import (
	"os"
	"runtime"
	"syscall"
)

// To this very thread, not to the process: a signal to the process may be taken by another thread, and this one would
// run on for a moment, past the point.

func killSelf() { signalSelf(syscall.SIGKILL) }

func stopSelf() { signalSelf(syscall.SIGSTOP) }

func signalSelf(signal syscall.Signal) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := syscall.Tgkill(os.Getpid(), syscall.Gettid(), signal); err != nil {
		panic("failpoint: signal self: " + err.Error())
	}
}
