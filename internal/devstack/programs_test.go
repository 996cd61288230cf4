package devstack

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProgram_WhatIsHereIsUsed(t *testing.T) {
	t.Parallel()
	m := thisMachine()
	m.install = func(context.Context, io.Writer, wanted) error { return errors.New("nothing was to be installed") }
	m.lookPath = func(name string) (string, error) {
		if name == "google-chrome" {
			return "/opt/google-chrome", nil
		}
		return "", exec.ErrNotFound
	}
	path, err := m.locateExtra(t.Context(), Config{}, programs["chromium"])
	require.NoError(t, err)
	require.Equal(t, "/opt/google-chrome", path)

	_, err = m.locateExtra(t.Context(), Config{NoInstall: true}, programs["curl"])
	require.ErrorIs(t, err, ErrNoServer)
	require.ErrorContains(t, err, "on Debian the package curl")

	_, err = Program(t.Context(), nil, "lynx")
	require.ErrorContains(t, err, "but chromium, curl, node, npm")
}
