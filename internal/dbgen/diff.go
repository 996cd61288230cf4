package main

import (
	"fmt"
	"strings"
)

// difference shows where two texts part: enough to see what went stale, for the whole of it there is git diff.
func difference(have, want string) string {
	const context, shown = 3, 12
	a, b := strings.Split(have, "\n"), strings.Split(want, "\n")
	first := 0
	for first < len(a) && first < len(b) && a[first] == b[first] {
		first++
	}
	for len(a) > first && len(b) > first && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	var out strings.Builder
	fmt.Fprintf(&out, "@@ line %d @@\n", first+1)
	for _, line := range a[max(0, first-context):first] {
		out.WriteString("  " + line + "\n")
	}
	part := func(sign string, lines []string) {
		for _, line := range lines[:min(shown, len(lines))] {
			out.WriteString(sign + " " + line + "\n")
		}
		if len(lines) > shown {
			fmt.Fprintf(&out, "%s ... %d lines more\n", sign, len(lines)-shown)
		}
	}
	part("-", a[first:])
	part("+", b[first:])
	return out.String()
}
