//go:build unix && !linux

package childtest

import "syscall"

func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }

// stopped cannot be asked here: the signal was sent.
func stopped(int) bool { return true }
