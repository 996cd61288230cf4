package devstack

import (
	"context"
	_ "embed" // the shim's source
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

//go:embed clockshift/clockshift.c
var clockShift string

// shiftedClock builds what moves the clock of a server, and returns the environment to run it in. Programs of Go ask the
// kernel for the time, so the server's clock is moved and not ours.
func shiftedClock(ctx context.Context, offset time.Duration, dir string, as *syscall.Credential) ([]string, error) {
	if offset == 0 {
		return nil, nil
	}
	source, library := filepath.Join(dir, "clockshift.c"), filepath.Join(dir, "clockshift.so")
	if err := serverFile(source, clockShift, as); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "cc", "-shared", "-fPIC", "-O2", "-o", library, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("devstack: Config.ClockOffset needs a C compiler (on Debian the packages gcc and libc6-dev): %w\n%s", err, out)
	}
	if err := os.Chmod(library, 0o755); err != nil { //nolint:gosec // a library the server's user loads
		return nil, fmt.Errorf("devstack: move the server's clock: %w", err)
	}
	return []string{"LD_PRELOAD=" + library, fmt.Sprintf("PGONCE_CLOCK_SHIFT=%d", offset/time.Second)}, nil
}
