package pgtest

import (
	"errors"
	"os"
	"testing"

	"github.com/pgonce/pgonce/internal/devstack"
)

// Program is where curl, node, npm or chromium is; it is installed if it has to be. Where that cannot be done the test is skipped,
// which CI does not allow.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := devstack.Program(t.Context(), &devstack.Config{Out: os.Stderr}, name) // at once: it may take a while
	switch {
	case errors.Is(err, devstack.ErrNoServer):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
	return path
}
