package devstack

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// sweepGrace is how long a left-over server gets to stop before it is killed. PostgreSQL's gives its own processes 5 s of that.
const sweepGrace = 10 * time.Second

// sweepFolders removes the folders of killed runs, and stops a server that still runs in one.
func sweepFolders(out io.Writer, parents []string) {
	for _, parent := range parents {
		dirs, _ := filepath.Glob(filepath.Join(parent, folderPrefix+"*")) // the only error is a bad pattern
		for _, dir := range dirs {
			if !left(dir) {
				continue
			}
			servers, _ := filepath.Glob(filepath.Join(dir, "pg*", "data", "postmaster.pid")) // as above
			for _, pidFile := range servers {
				stopLeftServer(pidFile, dir)
			}
			stopLeftServer(filepath.Join(dir, "redis", "redis.pid"), dir)
			if err := os.RemoveAll(dir); err != nil {
				_, _ = fmt.Fprintf(out, "devstack: sweep: %v\n", err)
				continue
			}
			_, _ = fmt.Fprintf(out, "devstack: removed %s, left by a killed run\n", dir)
		}
	}
}

// left reports whether the folder is one we made, as this user, for a process that is provably dead. The user matters:
// in /tmp anybody can make a folder with our name and any content.
func left(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return false
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Geteuid() {
		return false
	}
	text, err := os.ReadFile(filepath.Join(dir, ownerFile))
	if err != nil {
		return false
	}
	o, err := parseOwner(text)
	return err == nil && o.provablyDead()
}

// stopLeftServer stops the process a pid file names, after checking that it is a server working in our folder.
func stopLeftServer(pidFile, dir string) {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	pid, err := strconv.Atoi(strings.TrimSpace(string(line)))
	if err != nil || pid <= 1 {
		return
	}
	// Open first, check second: the handle stays with this process even if the number is given to another one.
	process, err := os.FindProcess(pid)
	if err != nil {
		return
	}
	defer func() { _ = process.Release() }() // nothing to do about it
	runs := func() bool { return runsIn(pid, dir, "postgres", "redis-server", "valkey-server") }
	if !runs() {
		return
	}
	_ = process.Signal(syscall.SIGTERM) // redis: save nothing, stop; postgres: no new connections
	_ = process.Signal(syscall.SIGQUIT) // postgres: stop at once; errors mean that it is gone
	for deadline := time.Now().Add(sweepGrace); time.Now().Before(deadline); time.Sleep(startPoll) {
		if !runs() {
			return
		}
	}
	children, _ := childrenOf(pid) // none where they cannot be listed
	_ = process.Kill()
	for _, child := range children {
		if runsIn(child, dir, "postgres") {
			_ = syscall.Kill(child, syscall.SIGKILL) // one that was stopped would stay for ever: it has nobody to kill it any more
		}
	}
}

// sweepDatabases drops databases which killed runs left on a server that is not ours: only those whose comment names a
// process of this machine that is provably dead, and only while nobody is connected.
func (s *Stack) sweepDatabases(ctx context.Context) {
	rows, err := s.admin(ctx, `SELECT datname, coalesce(shobj_description(oid, 'pg_database'), '')
		FROM pg_database WHERE datname LIKE 'pgonce\_%' ORDER BY datname`)
	if err != nil {
		_, _ = fmt.Fprintf(s.out, "devstack: sweep: %v\n", err)
		return
	}
	for _, row := range rows {
		name, comment := row[0], row[1]
		mark, ours := strings.CutPrefix(comment, commentPrefix)
		if !ours || !databaseName.MatchString(name) {
			continue
		}
		if o, err := parseOwner([]byte(mark)); err != nil || !o.provablyDead() {
			continue
		}
		// Without FORCE: a connection is one more sign that somebody needs it.
		if _, err := s.admin(ctx, "DROP DATABASE IF EXISTS "+name); err != nil {
			_, _ = fmt.Fprintf(s.out, "devstack: sweep %s: %v\n", name, err)
			continue
		}
		_, _ = fmt.Fprintf(s.out, "devstack: dropped database %s, left by a killed run\n", name)
	}
}
