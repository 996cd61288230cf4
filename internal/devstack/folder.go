package devstack

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// folderPrefix begins the names of our temporary folders.
const folderPrefix = "pgonce-"

// maxSocketFolder keeps folder + "/pg/.s.PGSQL.65535" within the 103 (macOS) or 107 (Linux) bytes of a socket path.
const maxSocketFolder = 80

// tempDirs are the folders our folders may be in, the preferred one first. Root's TMPDIR may lie below a 0700 home,
// where the server's user cannot go, and macOS's is long.
func (m machine) tempDirs() []string {
	if dir := filepath.Clean(os.TempDir()); dir != "/tmp" {
		return []string{dir, "/tmp"}
	}
	return []string{"/tmp"}
}

func (m machine) usable(dir string) bool {
	return len(dir)+len(folderPrefix)+10 <= maxSocketFolder && (!m.root || reachable(dir))
}

// newFolder makes the stack's folder and says in it who owns it, for the sweep.
func newFolder(m machine) (string, error) {
	dirs := m.tempDirs()
	parent := dirs[len(dirs)-1]
	for _, dir := range dirs {
		if m.usable(dir) {
			parent = dir
			break
		}
	}
	dir, err := os.MkdirTemp(parent, folderPrefix)
	if err != nil {
		return "", fmt.Errorf("devstack: make folder: %w", err)
	}
	me, err := thisOwner()
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, ownerFile), []byte(me.String()), 0o600)
	}
	if err == nil && m.root {
		err = os.Chmod(dir, 0o711) // the server's user walks through it to its own folder, and sees nothing else
	}
	if err != nil {
		_ = os.RemoveAll(dir) // the first error is the one to tell
		return "", fmt.Errorf("devstack: make folder: %w", err)
	}
	return dir, nil
}

// serverFolder makes the folder one server owns.
func serverFolder(parent, name string, as *syscall.Credential) (string, error) {
	dir := filepath.Join(parent, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("devstack: make folder: %w", err)
	}
	return dir, chown(dir, as)
}

// serverFile writes a file only the server's user (and root) can read.
func serverFile(path, text string, as *syscall.Credential) error {
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("devstack: write file: %w", err)
	}
	return chown(path, as)
}

func chown(path string, as *syscall.Credential) error {
	if as == nil {
		return nil
	}
	if err := os.Chown(path, int(as.Uid), int(as.Gid)); err != nil {
		return fmt.Errorf("devstack: give file to the server's user: %w", err)
	}
	return nil
}
