package devstack

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrNoServer means that no server was named, found or installable. The error's text says what to type.
	ErrNoServer = errors.New("devstack: no server")

	// ErrNoRedis is ErrNoServer where it is Redis that is missing.
	ErrNoRedis = fmt.Errorf("%w for Redis", ErrNoServer)

	// ErrForeignDatabase means that a database was not created by this stack, so it is not touched.
	ErrForeignDatabase = errors.New("devstack: not a database of this stack")
)

// notFound is the error for a server program that is not here, with the line to type on this system.
func (m machine) notFound(w wanted, skipped []string) error {
	text := fmt.Sprintf("no %s %s found", w.name, w.versions())
	if len(skipped) > 0 {
		text += " (" + strings.Join(skipped, "; ") + ")"
	}
	return fmt.Errorf("%w: %s: %s, or set %s", w.missing, text, m.installHint(w), w.env)
}

// installHint is the line to type, for the first package manager that is here.
func (m machine) installHint(w wanted) string {
	sudo := "sudo "
	if m.root {
		sudo = ""
	}
	for _, pm := range []struct{ program, line string }{
		{"apt-get", sudo + "apt-get install -y --no-install-recommends " + w.pkg.apt},
		{"dnf", sudo + "dnf install -y " + w.pkg.dnf},
		{"apk", sudo + "apk add " + w.pkg.apk},
		{"brew", "brew install " + w.pkg.brew},
	} {
		if _, err := m.lookPath(pm.program); err == nil {
			return fmt.Sprintf("type %q", pm.line)
		}
	}
	return fmt.Sprintf("install it so that %s is on the PATH", w.programs[0])
}
