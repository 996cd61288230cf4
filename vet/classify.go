package vet

import (
	"go/ast"
	"go/types"
)

// origin says where a handle comes from.
type origin int

const (
	unknown    origin = iota
	own               // the connection of a transaction, or a savepoint
	ofFunction        // the transaction, from txn.FromContext
	ofParam           // what the function was given
	captured          // a transaction from around the literal
	past              // a pool or a connection of its own
)

// classify says what a handle is to fn, and of which parameter.
func (c *checker) classify(fn *function, e ast.Expr) (origin, int) {
	for range 10 {
		e = ast.Unparen(e)
		t := c.TypesInfo.TypeOf(e)
		if t == nil {
			return unknown, -1
		}
		var definition ast.Expr
		if id, is := e.(*ast.Ident); is {
			v, is := c.TypesInfo.ObjectOf(id).(*types.Var)
			if !is {
				return unknown, -1
			}
			if param, is := fn.params[v]; is {
				return ofParam, param
			}
			definition = c.definitions[v]
			if definition == nil && handleOf(t) == txHandle && fn.literal != nil && !v.IsField() && v.Parent() != c.Pkg.Scope() &&
				(v.Pos() < fn.literal.Pos() || v.Pos() > fn.literal.End()) {
				return captured, -1
			}
		}
		switch {
		case handleOf(t) == pastHandle:
			return past, -1
		case definition != nil:
			if from := c.originOf(fn, definition, e); from != unknown {
				return from, -1
			}
			e = definition
			continue
		}
		return c.originOfExpr(e, t)
	}
	return unknown, -1
}

// originOf looks at what a variable is defined as.
func (c *checker) originOf(fn *function, definition, use ast.Expr) origin {
	call, is := ast.Unparen(definition).(*ast.CallExpr)
	if !is || c.TypesInfo.Types[call.Fun].IsType() {
		return unknown
	}
	callee := c.callee(call)
	if callee == nil {
		return unknown
	}
	outer := fn.literal != nil && (call.Pos() < fn.literal.Pos() || call.Pos() > fn.literal.End())
	switch {
	case handleOf(c.TypesInfo.TypeOf(use)) == txHandle && outer:
		return captured
	case named(callee, txnPath, "FromContext"):
		return ofFunction
	case handleOf(c.TypesInfo.TypeOf(use)) == txHandle:
		return own // a savepoint, or begun on a pool, which is a finding of its own
	}
	return unknown
}

// originOfExpr looks at what is no variable, or has no definition to look at.
func (c *checker) originOfExpr(e ast.Expr, t types.Type) (origin, int) {
	switch x := e.(type) {
	case *ast.CallExpr:
		if c.TypesInfo.Types[x.Fun].IsType() && len(x.Args) == 1 {
			if handleOf(c.TypesInfo.TypeOf(x.Args[0])) == pastHandle {
				return past, -1
			}
			return unknown, -1
		}
		callee := c.callee(x)
		switch {
		case callee == nil:
		case callee.Name() == "Conn" && receiver(callee) != nil && handleOf(receiver(callee)) == pastHandle,
			named(callee, pgxPath, "Connect"), named(callee, pgxPath, "ConnectConfig"):
			return past, -1
		}
	case *ast.SelectorExpr:
		if handleOf(t) == connHandle { // kept in a struct
			return past, -1
		}
	case *ast.Ident:
		if v, is := c.TypesInfo.ObjectOf(x).(*types.Var); is && handleOf(t) == connHandle && v.Parent() == c.Pkg.Scope() {
			return past, -1
		}
	}
	return unknown, -1
}
