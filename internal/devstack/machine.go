package devstack

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// machine is what Start asks about this computer. Tests replace fields.
type machine struct {
	getenv   func(string) string
	lookPath func(string) (string, error)
	glob     func(string) ([]string, error)
	install  func(ctx context.Context, out io.Writer, w wanted) error // nil: cannot install
	root     bool

	engine      func(ctx context.Context) error // does a Docker engine answer?
	dockerstack func(ctx context.Context, out io.Writer, folder string) (program string, err error)

	platform string
	binaries map[int]binary // what npm has, by major version
	cache    func() (string, error)
}

func thisMachine() machine {
	m := machine{
		getenv:   os.Getenv,
		lookPath: exec.LookPath,
		glob:     filepath.Glob,
		root:     os.Geteuid() == 0,
		platform: runtime.GOOS + "/" + runtime.GOARCH,
		binaries: npmBinaries,
	}
	m.engine = func(ctx context.Context) error { return engineAnswers(ctx, m.getenv) }
	m.dockerstack = m.buildDockerstack
	m.cache = m.cacheFolder
	if _, err := exec.LookPath("apt-get"); err == nil && m.root {
		m.install = aptInstall
	}
	return m
}

// packages are the names of one server's package.
type packages struct{ apt, dnf, apk, brew string }

// wanted describes a server program.
type wanted struct {
	name     string // for people
	missing  error  // there is none
	env      string // names a server to use instead
	min      int    // oldest major version
	only     int    // the one major version asked for, 0 if any will do
	programs []string
	folders  []string // where it lives when it is not on the PATH
	version  *regexp.Regexp
	pkg      packages
}

func (w wanted) takes(version int) bool {
	return version >= w.min && (w.only == 0 || version == w.only)
}

// versions says for people which versions will do.
func (w wanted) versions() string {
	if w.only != 0 {
		return strconv.Itoa(w.only)
	}
	return strconv.Itoa(w.min) + " or newer"
}

var (
	wantPostgres = wanted{
		name:     "PostgreSQL",
		missing:  ErrNoServer,
		env:      "PGONCE_DATABASE_URL to a server where databases pgonce_* may be created",
		min:      15,
		programs: []string{"postgres"},
		folders: []string{
			"/usr/lib/postgresql/*/bin",       // Debian, Ubuntu
			"/usr/pgsql-*/bin",                // PGDG on Fedora, RHEL
			"/usr/libexec/postgresql*",        // Alpine
			"/usr/local/pgsql/bin",            // from source
			"/opt/homebrew/opt/postgres*/bin", // Homebrew
			"/usr/local/opt/postgres*/bin",    // Homebrew on Intel
			"/Applications/Postgres.app/Contents/Versions/*/bin",
		},
		version: regexp.MustCompile(`\(PostgreSQL\) (\d+)`),
		pkg:     packages{apt: "postgresql", dnf: "postgresql-server", apk: "postgresql", brew: "postgresql@17"},
	}
	wantRedis = wanted{
		name:     "Redis",
		missing:  ErrNoRedis,
		env:      "PGONCE_REDIS_URL",
		min:      7,
		programs: []string{"redis-server", "valkey-server"},
		folders:  []string{"/opt/homebrew/opt/redis*/bin", "/usr/local/opt/redis*/bin"},
		version:  regexp.MustCompile(`v=(\d+)`),
		pkg:      packages{apt: "redis-server", dnf: "redis", apk: "redis", brew: "redis"},
	}
)

// find returns the program to run: the one on the PATH, else the newest elsewhere. found is false if there is none;
// skipped then says what was here and unfit.
func (m machine) find(ctx context.Context, w wanted) (program string, found bool, skipped []string) {
	var candidates []string
	for _, name := range w.programs {
		if path, err := m.lookPath(name); err == nil {
			if version, why := m.fit(ctx, w, path); version > 0 {
				return path, true, nil
			} else if why != "" {
				skipped = append(skipped, why)
			}
		}
		for _, folder := range w.folders {
			paths, _ := m.glob(filepath.Join(folder, name)) // the only error is a bad pattern
			candidates = append(candidates, paths...)
		}
	}
	newest := 0
	for _, path := range candidates {
		version, why := m.fit(ctx, w, path)
		if why != "" {
			skipped = append(skipped, why)
		}
		if version > newest {
			program, newest = path, version
		}
	}
	return program, newest > 0, skipped
}

// fit returns the program's major version, or 0 and why we cannot use it.
func (m machine) fit(ctx context.Context, w wanted, path string) (version int, why string) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return 0, ""
	}
	// The server runs as another user when we are root: it cannot start from below a 0700 home.
	if m.root && !reachable(real) {
		return 0, path + " cannot be read by the user the server runs as"
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return 0, fmt.Sprintf("%s --version: %v", path, err)
	}
	match := w.version.FindSubmatch(out)
	if match == nil {
		return 0, path + " has no version we know"
	}
	version, _ = strconv.Atoi(string(match[1])) // digits by the expression
	if !w.takes(version) {
		return 0, fmt.Sprintf("%s is version %d", path, version)
	}
	return version, ""
}

// reachable reports whether any user may walk down to the path.
func reachable(path string) bool {
	for dir := filepath.Clean(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}

// serverUser is whom the servers run as: nil means as ourselves. PostgreSQL refuses to run as root.
func (m machine) serverUser(names ...string) (*syscall.Credential, error) {
	if !m.root {
		return nil, nil //nolint:nilnil // no credential is how exec says "as ourselves"
	}
	for _, name := range names {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.ParseUint(u.Uid, 10, 32)
		gid, errGID := strconv.ParseUint(u.Gid, 10, 32)
		if errUID == nil && errGID == nil && uid != 0 {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, fmt.Errorf("devstack: find a user to run the server as: none of %s exists: run as an ordinary user",
		strings.Join(names, ", "))
}
