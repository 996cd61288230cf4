package vet

import (
	"go/token"
	"regexp"
	"strings"

	"golang.org/x/tools/go/analysis"
)

const allowPrefix = "//pgonce:allow"

var allowForm = regexp.MustCompile(`^//pgonce:allow (pool|http|tx): *(\S.*)$`)

// allowance is a comment that accepts findings of one kind in its line and in the next one.
type allowance struct {
	pos  token.Pos
	kind kind
	used bool
}

type lineOf struct {
	file string
	line int
}

type allowances map[lineOf][]*allowance

func (c *checker) readAllowances() allowances {
	all := allowances{}
	for _, file := range c.Files {
		for _, group := range file.Comments {
			for _, comment := range group.List {
				if !strings.HasPrefix(comment.Text, allowPrefix) {
					continue
				}
				text, _, _ := strings.Cut(comment.Text, " // want") // of the tests
				m := allowForm.FindStringSubmatch(text)
				if m == nil {
					c.Report(analysis.Diagnostic{
						Pos: comment.Pos(), Category: "allow",
						Message: "a finding is accepted with its kind and a reason: //pgonce:allow pool: why (or http, or tx)",
					})
					continue
				}
				p := c.Fset.Position(comment.Pos())
				a := &allowance{pos: comment.Pos(), kind: kind(m[1])}
				for _, line := range []int{p.Line, p.Line + 1} {
					at := lineOf{p.Filename, line}
					all[at] = append(all[at], a)
				}
			}
		}
	}
	return all
}

// accepts reports whether a comment accepts a finding there.
func (all allowances) accepts(p token.Position, k kind) bool {
	for _, a := range all[lineOf{p.Filename, p.Line}] {
		if a.kind == k {
			a.used = true
			return true
		}
	}
	return false
}

func (all allowances) reportUnused(pass *analysis.Pass) {
	said := map[*allowance]bool{}
	for _, some := range all {
		for _, a := range some {
			if !a.used && !said[a] {
				said[a] = true
				pass.Report(analysis.Diagnostic{Pos: a.pos, Category: "allow", Message: "there is nothing to accept here: remove the comment"})
			}
		}
	}
}
