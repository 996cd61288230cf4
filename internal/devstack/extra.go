package devstack

import (
	"context"
	"fmt"
	"io"
	"time"
)

// extra is a program or library that only some runs need, beside the servers of a Stack.
type extra struct {
	name string
	pkg  string // the Debian package
	// find returns where it is.
	find func(m machine) (path string, found bool)
}

// locateExtra finds it, installing its package if that is needed and allowed.
func (m machine) locateExtra(ctx context.Context, cfg Config, e extra) (string, error) {
	if path, found := e.find(m); found {
		return path, nil
	}
	if m.install == nil || cfg.NoInstall || m.getenv("PGONCE_NO_INSTALL") != "" {
		return "", fmt.Errorf("%w: %s: install it (on Debian the package %s)", ErrNoServer, e.name, e.pkg)
	}
	if err := aptInstallExtra(ctx, cfg.Out, m, e); err != nil {
		return "", err
	}
	path, found := e.find(m)
	if !found {
		return "", fmt.Errorf("%w: %s: the package %s does not have it", ErrNoServer, e.name, e.pkg)
	}
	return path, nil
}

// aptInstallExtra installs one package and starts nothing. Several processes may call it at once.
func aptInstallExtra(ctx context.Context, out io.Writer, m machine, e extra) error {
	unlock, err := lockFile(ctx, installLock)
	if err != nil {
		return err
	}
	defer unlock()
	if _, found := e.find(m); found {
		return nil // another process installed it while we waited
	}
	// Interrupting dpkg would leave the machine half configured: from here on the caller's context does not count.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), installGrace)
	defer cancel()
	removePolicy, err := writePolicy()
	if err != nil {
		return err
	}
	defer removePolicy()
	_, _ = fmt.Fprintf(out, "devstack: %s is not here: installing the package %s, "+
		"without starting services (PGONCE_NO_INSTALL=1 forbids it) ...\n", e.name, e.pkg)
	began := time.Now()
	if err := aptGetFresh(ctx, e.pkg); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(out, "devstack: installed %s in %.0f s\n", e.pkg, time.Since(began).Seconds())
	return nil
}

// onPath looks for a program, under any of its names, on the PATH and in the folder of programs that only root is expected to call.
func onPath(names ...string) func(machine) (string, bool) {
	return func(m machine) (string, bool) {
		for _, name := range names {
			for _, try := range []string{name, "/usr/sbin/" + name} {
				if path, err := m.lookPath(try); err == nil {
					return path, true
				}
			}
		}
		return "", false
	}
}
