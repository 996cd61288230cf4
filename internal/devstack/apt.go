package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	installLock   = "/run/pgonce-install.lock"
	installGrace  = 15 * time.Minute
	aptUpdates    = 5
	aptUpdateWait = 5 * time.Second

	policyFile    = "/usr/sbin/policy-rc.d"
	createCluster = "/etc/postgresql-common/createcluster.conf"
)

// policy keeps apt from starting services while it is installing. It expires by itself: if we are killed before we
// remove it, it must not keep the machine's services down for ever.
const policy = `#!/bin/sh
# Written by pgonce for one installation; without effect after 15 minutes.
[ -n "$(find "$0" -mmin -15)" ] && exit 101
exit 0
`

// noCluster keeps Debian's scripts from creating a cluster: we need the programs only.
const noCluster = "\ncreate_main_cluster = false\n"

// aptInstall installs one server's package and starts nothing. Several processes may call it at once.
func aptInstall(ctx context.Context, out io.Writer, w wanted) error {
	unlock, err := lockFile(ctx, installLock)
	if err != nil {
		return err
	}
	defer unlock()
	if _, found, _ := thisMachine().find(ctx, w); found {
		return nil // another process installed it while we waited
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("devstack: install %s: %w", w.name, err)
	}
	// Interrupting dpkg would leave the machine half configured: from here on the caller's context does not count.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), installGrace)
	defer cancel()

	pkg := aptPackage(ctx, w)
	if pkg == "" {
		_, _ = fmt.Fprintln(out, "devstack: apt-get update ...")
		if err := aptUpdate(ctx); err != nil {
			return err
		}
		if pkg = aptPackage(ctx, w); pkg == "" {
			return absent("the distribution has no package that fits")
		}
	}
	_, _ = fmt.Fprintf(out, "devstack: %s is not here: installing the package %s, "+
		"without starting services (PGONCE_NO_INSTALL=1 forbids it) ...\n", w.name, pkg)
	began := time.Now()
	removePolicy, err := writePolicy()
	if err != nil {
		return err
	}
	defer removePolicy()
	if strings.HasPrefix(pkg, "postgresql") {
		if err := aptGetFresh(ctx, "postgresql-common"); err != nil {
			return err
		}
		restore, err := appendTo(createCluster, noCluster)
		if err != nil {
			return err
		}
		defer restore()
	}
	if err := aptGetFresh(ctx, pkg); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(out, "devstack: installed %s in %.0f s\n", pkg, time.Since(began).Seconds())
	return nil
}

// aptPackage is the package to install, as far as apt knows it: for PostgreSQL the newest postgresql-<major> that is
// new enough, or the version asked for.
func aptPackage(ctx context.Context, w wanted) string {
	names, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", w.pkg.apt).Output()
	if err != nil {
		return ""
	}
	versioned := regexp.MustCompile(`^` + w.pkg.apt + `-(\d+)$`)
	best, newest := "", w.min-1
	for name := range strings.FieldsSeq(string(names)) {
		if match := versioned.FindStringSubmatch(name); match != nil {
			// apt-cache also knows names it cannot install (only mentioned by another package).
			major, err := strconv.Atoi(match[1])
			if err == nil && major > newest && (w.only == 0 || major == w.only) && aptHas(ctx, name) {
				best, newest = name, major
			}
		}
		if name == w.pkg.apt && w.name == wantRedis.name && aptHas(ctx, name) {
			return name
		}
	}
	return best
}

func aptHas(ctx context.Context, name string) bool {
	out, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", name).Output()
	return err == nil && bytes.Contains(out, []byte("Filename:"))
}

// aptGetFresh installs a package; if that fails it tries once more with fresh lists, which may have been too old to
// name files the mirror still has.
func aptGetFresh(ctx context.Context, pkg string) error {
	args := []string{"install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3", pkg}
	first := aptGet(ctx, args...)
	if first == nil {
		return nil
	}
	if err := aptUpdate(ctx); err != nil {
		return errors.Join(first, err)
	}
	return aptGet(ctx, args...)
}

// aptUpdate fetches the lists. Their lock has no waiting option: another apt-get update makes ours fail at once.
func aptUpdate(ctx context.Context) error {
	var err error
	for range aptUpdates {
		if err = aptGet(ctx, "update", "-q"); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(aptUpdateWait):
		}
	}
	return err
}

func aptGet(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must not reach dpkg
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("devstack: apt-get %s: %w; it said:\n%s", args[0], err, out)
	}
	return nil
}

// writePolicy puts our policy-rc.d in place if there is none, and returns what takes it away again.
func writePolicy() (remove func(), err error) {
	if text, err := os.ReadFile(policyFile); err == nil && string(text) == policy {
		_ = os.Remove(policyFile) // left by a killed run: its clock has to start again
	}
	f, err := os.OpenFile(policyFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if errors.Is(err, os.ErrExist) {
		return func() {}, nil // the machine's own policy stays
	}
	if err != nil {
		return nil, fmt.Errorf("devstack: keep services from starting: %w", err)
	}
	_, err = f.WriteString(policy)
	if err := errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(policyFile) // the first error is the one to tell
		return nil, fmt.Errorf("devstack: keep services from starting: %w", err)
	}
	return func() { _ = os.Remove(policyFile) }, nil // without effect after 15 minutes anyway
}

// appendTo adds text to a configuration file and returns what restores the file.
func appendTo(path, text string) (restore func(), err error) {
	before, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("devstack: keep a cluster from being created: %w", err)
	}
	write := func(content []byte) error { return os.WriteFile(path, content, 0o644) } // keeps an existing file's mode
	if err := write(append(bytes.Clone(before), text...)); err != nil {
		return nil, fmt.Errorf("devstack: keep a cluster from being created: %w", err)
	}
	return func() { _ = write(before) }, nil // worst case: the line stays, and no cluster is created later either
}

// lockFile waits for an exclusive lock. The kernel gives it back when we die.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("devstack: lock installation: %w", err)
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("devstack: lock installation: %w", err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("devstack: wait for another installation: %w", ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
