package vet

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/analysis"
)

// Analyzer finds functions that go past the transaction they were given.
var Analyzer = &analysis.Analyzer{
	Name:      "pgonce",
	Doc:       "find functions of pgonce's package txn that go past their transaction\n\n" + doc,
	URL:       "https://pkg.go.dev/github.com/pgonce/pgonce/vet",
	FactTypes: []analysis.Fact{new(effects)},
	Run:       run,
}

const doc = `A pool, a connection or a database/sql handle used inside is not part of the transaction; a transaction that is ended or
given to a goroutine is not the runner's any more; a call to somebody else cannot be rolled back. Accept a finding by a comment
with a reason: //pgonce:allow pool: why (or http, or tx).`

// checker looks at one package.
type checker struct {
	*analysis.Pass
	decls       map[*types.Func]*function
	order       []*types.Func           // of the declarations, so that the same thing is said every time
	definitions map[*types.Var]ast.Expr // nil: more than one
	repooled    map[*types.Var]bool     // GORM's that get a ConnPool, which is the transaction
	roots       []*function
	// Parameters that are functions, and the declarations that run theirs in a transaction.
	functionParams map[*types.Var]paramOf
	wrappers       map[*types.Func][]int
	free           map[*ast.FuncLit]bool // run in a transaction of their own, or in none
	known          map[*types.Func]*effects
	closures       map[*ast.FuncLit]*effects
	allowed        allowances
	said           map[string]bool
}

// function is a declaration or a literal.
type function struct {
	literal *ast.FuncLit // nil: a declaration
	body    *ast.BlockStmt
	params  map[*types.Var]int // and the receiver, as ofReceiver
	isRoot  bool
}

func run(pass *analysis.Pass) (any, error) {
	if standard(pass.Pkg.Path()) || opaque(pass.Pkg.Path()) {
		return nil, nil //nolint:nilnil // nothing to say of it
	}
	c := &checker{
		Pass: pass, decls: map[*types.Func]*function{}, definitions: map[*types.Var]ast.Expr{}, repooled: map[*types.Var]bool{},
		functionParams: map[*types.Var]paramOf{}, wrappers: map[*types.Func][]int{}, free: map[*ast.FuncLit]bool{},
		known: map[*types.Func]*effects{}, said: map[string]bool{},
	}
	c.allowed = c.readAllowances()
	c.collect()
	c.findRoots()
	c.findWrapped()
	c.learn()
	for _, root := range c.roots {
		c.scan(root, func(f finding) { c.report(f) })
	}
	c.allowed.reportUnused(pass)
	return nil, nil //nolint:nilnil // there is only the facts
}

// collect notes the package's functions, and what its variables are defined as.
func (c *checker) collect() {
	for _, file := range c.Files {
		for _, decl := range file.Decls {
			d, is := decl.(*ast.FuncDecl)
			if !is || d.Body == nil {
				continue
			}
			if obj, is := c.TypesInfo.Defs[d.Name].(*types.Func); is {
				c.order = append(c.order, obj)
				c.decls[obj] = &function{body: d.Body, params: c.params(d)}
				for v, index := range c.decls[obj].params {
					if _, is := v.Type().Underlying().(*types.Signature); is {
						c.functionParams[v] = paramOf{obj, index}
					}
				}
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				c.define(n.Lhs, n.Rhs)
				for _, to := range n.Lhs {
					c.repool(to)
				}
			case *ast.ValueSpec:
				names := make([]ast.Expr, len(n.Names))
				for i, name := range n.Names {
					names[i] = name
				}
				c.define(names, n.Values)
			case *ast.UnaryExpr:
				if id, is := n.X.(*ast.Ident); is && n.Op == token.AND { // changed elsewhere, maybe
					c.undefine(id)
				}
			}
			return true
		})
	}
}

// params are those of a declaration or a literal.
func (c *checker) params(n ast.Node) map[*types.Var]int {
	params, i := map[*types.Var]int{}, 0
	var t *ast.FuncType
	switch n := n.(type) {
	case *ast.FuncLit:
		t = n.Type
	case *ast.FuncDecl:
		t = n.Type
		if n.Recv != nil && len(n.Recv.List) == 1 && len(n.Recv.List[0].Names) == 1 {
			if v, is := c.TypesInfo.Defs[n.Recv.List[0].Names[0]].(*types.Var); is {
				params[v] = ofReceiver
			}
		}
	}
	for _, field := range t.Params.List {
		for _, name := range field.Names {
			if v, is := c.TypesInfo.Defs[name].(*types.Var); is {
				params[v] = i
			}
			i++
		}
		if len(field.Names) == 0 {
			i++
		}
	}
	return params
}

func (c *checker) define(names, values []ast.Expr) {
	for i, name := range names {
		id, is := name.(*ast.Ident)
		if !is || len(values) == 0 {
			continue
		}
		v, is := c.TypesInfo.ObjectOf(id).(*types.Var)
		if !is {
			continue
		}
		value := values[0] // of a call with several results too
		if len(names) == len(values) {
			value = values[i]
		}
		if _, again := c.definitions[v]; again {
			value = nil
		}
		c.definitions[v] = value
	}
}

func (c *checker) repool(to ast.Expr) {
	field, is := to.(*ast.SelectorExpr)
	if !is || field.Sel.Name != "ConnPool" {
		return
	}
	if statement, is := field.X.(*ast.SelectorExpr); is {
		if id, is := statement.X.(*ast.Ident); is {
			if v, is := c.TypesInfo.ObjectOf(id).(*types.Var); is {
				c.repooled[v] = true
			}
		}
	}
}

func (c *checker) undefine(id *ast.Ident) {
	if v, is := c.TypesInfo.ObjectOf(id).(*types.Var); is {
		c.definitions[v] = nil
	}
}

// learn finds out what the package's functions do, until nothing new comes to light, and tells the packages that import it.
func (c *checker) learn() {
	for changed := true; changed; {
		changed, c.closures = false, map[*ast.FuncLit]*effects{}
		for _, obj := range c.order {
			e := &effects{Runs: c.wrappers[obj]}
			c.scan(c.decls[obj], func(f finding) { e.add(f, c.place(f.pos)) })
			if old := c.known[obj]; old == nil && !e.empty() || old != nil && e.size() != old.size() {
				c.known[obj], changed = e, true
			}
		}
	}
	for obj, e := range c.known {
		c.ExportObjectFact(obj, e)
	}
}

// effectsOf is what a function is known to do, in this package or in another one.
func (c *checker) effectsOf(fn *types.Func) *effects {
	if e := c.known[fn]; e != nil {
		return e
	}
	e := &effects{}
	if fn.Pkg() != nil && fn.Pkg() != c.Pkg && c.ImportObjectFact(fn, e) {
		return e
	}
	return nil
}

func (c *checker) place(pos token.Pos) string {
	p := c.Fset.Position(pos)
	return fmt.Sprintf("%s:%d", filepath.Base(p.Filename), p.Line)
}

func (c *checker) report(f finding) {
	if f.param != always {
		return // a root's own parameter is the transaction, whose end is a finding of its own
	}
	text := f.String()
	if at := c.Fset.Position(f.pos).String() + text; !c.said[at] {
		c.said[at] = true
		c.Report(analysis.Diagnostic{Pos: f.pos, Category: string(f.Kind), Message: text})
	}
}

// standard packages have no dot in the first element of their path; so have those of tests, which are in no module.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return slices.Contains([]string{"net", "database", "context", "os", "runtime", "crypto", "internal", "vendor", "testing", "go", "encoding"}, first)
}
