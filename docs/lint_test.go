package docs_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A file with a build tag is linted only where somebody names its tag.
func TestLint_SeesFilesWithBuildTags(t *testing.T) {
	t.Parallel()
	usual := regexp.MustCompile(`(?m)^  build-tags: \[(.*)\]$`).FindStringSubmatch(read(t, ".golangci.yml"))
	require.NotNil(t, usual)
	// Of this machine, or one constant for the race detector.
	known := append(strings.Split(usual[1], ", "), "linux", "unix", "race")
	makefile := read(t, "Makefile")
	constraint := regexp.MustCompile(`(?m)^//go:build (.+)$`)
	word := regexp.MustCompile(`\w+`)
	seen := map[string]bool{}
	for _, name := range files(t, ".go") {
		for _, line := range constraint.FindAllStringSubmatch(read(t, name), -1) {
			for _, tag := range word.FindAllString(line[1], -1) {
				seen[tag] = true
			}
		}
	}
	require.Contains(t, seen, "pooler")
	for _, tag := range known {
		delete(seen, tag)
	}
	for tag := range seen {
		require.Regexp(t, `golangci-lint run .*--build-tags `+tag+` `, makefile, tag)
		require.Regexp(t, `go vet -tags `+tag+` `, makefile, tag)
	}
}
