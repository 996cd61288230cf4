package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// plant is one bug.
type plant struct {
	name  string
	why   string // what it would do to a service
	edits []edit
	// caught are the tests that must go red, all of them.
	caught suite
	// missed are tests that must stay green under it: what only caught can see. Empty for most.
	missed suite
}

// edit is a change of one place of a file.
type edit struct {
	file     string // relative to the module's folder, with slashes
	old, new string // old occurs exactly once
}

// everyTest is a suite's run for all tests of its package.
const everyTest = "^Test"

// suite is some tests of a package.
type suite struct {
	pkg  string // "./txn"
	run  string // go test's -run
	skip string // go test's -skip
}

// overlay writes the changed files into dir, and the list that tells the compiler of them. The list's path is what
// -overlay wants.
func (p plant) overlay(root, dir string) (string, error) {
	changed := map[string][]byte{}
	for _, e := range p.edits {
		path := filepath.Join(root, filepath.FromSlash(e.file))
		text, ok := changed[path]
		if !ok {
			var err error
			if text, err = os.ReadFile(path); err != nil {
				return "", err
			}
		}
		if n := bytes.Count(text, []byte(e.old)); n != 1 {
			return "", fmt.Errorf("the plant does not apply: its old text is %d times in %s, must be there once", n, e.file)
		}
		if e.old == e.new {
			return "", fmt.Errorf("the plant changes nothing in %s", e.file)
		}
		changed[path] = bytes.Replace(text, []byte(e.old), []byte(e.new), 1)
	}
	replace := map[string]string{}
	for path, text := range changed {
		copied := filepath.Join(dir, strconv.Itoa(len(replace))+"_"+filepath.Base(path))
		if err := os.WriteFile(copied, text, 0o600); err != nil {
			return "", err
		}
		replace[path] = copied
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o600)
}
