package vet

import "go/ast"

// scanClosure follows the call of a literal that a variable holds and that is written elsewhere: what is written in the function
// itself is looked at there.
func (c *checker) scanClosure(fn *function, call *ast.CallExpr, found func(finding)) {
	literal, is := c.resolve(call.Fun).(*ast.FuncLit)
	if !is || c.free[literal] || fn.body.Pos() <= literal.Pos() && literal.End() <= fn.body.End() {
		return
	}
	id, is := ast.Unparen(call.Fun).(*ast.Ident)
	if !is {
		return
	}
	e := c.closures[literal]
	if e == nil {
		e = &effects{}
		c.closures[literal] = e // it may call itself
		c.scan(&function{literal: literal, body: literal.Body, params: c.params(literal)}, func(f finding) { e.add(f, c.place(f.pos)) })
	}
	c.follow(fn, call, e, id.Name, found)
}
