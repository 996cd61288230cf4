package vet

import (
	"go/ast"
	"go/types"
	"slices"
)

// paramOf is a function among the parameters of a declaration.
type paramOf struct {
	fn    *types.Func
	index int
}

// runs notes a declaration that has its parameter run in a transaction: a service's own way to call package txn.
func (c *checker) runs(v *types.Var) {
	p, is := c.functionParams[v]
	if !is || slices.Contains(c.wrappers[p.fn], p.index) {
		return
	}
	c.wrappers[p.fn] = append(c.wrappers[p.fn], p.index)
}

// findWrapped finds what is given to those, and those that give it on.
func (c *checker) findWrapped() {
	for before := -1; before != c.rootsAndWrappers(); {
		before = c.rootsAndWrappers()
		for _, root := range slices.Clone(c.roots) {
			if root.literal != nil {
				c.runsParams(root)
			}
		}
		for _, file := range c.Files {
			ast.Inspect(file, func(n ast.Node) bool {
				if call, is := n.(*ast.CallExpr); is {
					for _, index := range c.runsOf(c.callee(call)) {
						if index < len(call.Args) {
							c.root(call.Args[index])
						}
					}
				}
				return true
			})
		}
	}
}

func (c *checker) rootsAndWrappers() int {
	n := len(c.roots)
	for _, indexes := range c.wrappers {
		n += len(indexes)
	}
	return n
}

// runsParams sees the parameters of what is around a literal that the literal calls.
func (c *checker) runsParams(root *function) {
	ast.Inspect(root.body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return !c.free[n]
		case *ast.CallExpr:
			if id, is := ast.Unparen(n.Fun).(*ast.Ident); is {
				if v, is := c.TypesInfo.Uses[id].(*types.Var); is {
					c.runs(v)
				}
			}
		}
		return true
	})
}

// runsOf are the parameters that fn runs in a transaction.
func (c *checker) runsOf(fn *types.Func) []int {
	if fn == nil {
		return nil
	}
	if fn.Pkg() != c.Pkg {
		if e := c.effectsOf(fn); e != nil {
			return e.Runs
		}
	}
	return c.wrappers[fn]
}
