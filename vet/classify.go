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
			return unknown, always
		}
		var definition ast.Expr
		if id, is := e.(*ast.Ident); is {
			v, is := c.TypesInfo.ObjectOf(id).(*types.Var)
			if !is {
				return unknown, always
			}
			var redefined bool
			definition, redefined = c.definitions[v]
			if param, is := fn.params[v]; is {
				if redefined && handleOf(t) == txHandle {
					return own, always // "tx, err := tx.Begin(ctx)" is the same variable: a savepoint from there on
				}
				return ofParam, param
			}
			if definition == nil && handleOf(t) == txHandle && fn.literal != nil && !v.IsField() && v.Parent() != c.Pkg.Scope() &&
				(v.Pos() < fn.literal.Pos() || v.Pos() > fn.literal.End()) {
				return captured, always
			}
		}
		switch {
		case handleOf(t) == pastHandle:
			return past, always
		case definition != nil:
			if from := c.originOf(fn, definition, e); from != unknown {
				return from, always
			}
			e = definition
			continue
		}
		return c.originOfExpr(e, t)
	}
	return unknown, always
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
	case fromContext(callee):
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
				return past, always
			}
			return unknown, always
		}
		callee := c.callee(x)
		switch {
		case callee == nil:
		case callee.Name() == "Conn" && receiver(callee) != nil && handleOf(receiver(callee)) == pastHandle,
			named(callee, pgxPath, "Connect"), named(callee, pgxPath, "ConnectConfig"):
			return past, always
		}
	case *ast.SelectorExpr:
		if handleOf(t) == connHandle { // kept in a struct
			return past, always
		}
	case *ast.Ident:
		if v, is := c.TypesInfo.ObjectOf(x).(*types.Var); is && handleOf(t) == connHandle && v.Parent() == c.Pkg.Scope() {
			return past, always
		}
	}
	return unknown, always
}

// madeBefore looks at what is no handle itself but has one in it, as sqlc's Queries: past, if it was there before the function of
// a transaction began; the parameter, or the receiver, that it is part of.
func (c *checker) madeBefore(fn *function, e ast.Expr) (origin, int) {
	for range 10 {
		switch x := ast.Unparen(e).(type) {
		case *ast.SelectorExpr:
			e = x.X
		case *ast.StarExpr:
			e = x.X
		case *ast.Ident:
			v, is := c.TypesInfo.ObjectOf(x).(*types.Var)
			if !is || handleOf(v.Type()) == txHandle || c.repooled[v] {
				return unknown, always
			}
			if param, is := fn.params[v]; is {
				if fn.isRoot && param == ofReceiver {
					return past, always
				}
				return ofParam, param
			}
			definition := c.definitions[v]
			outside := fn.literal != nil && (v.Pos() < fn.literal.Pos() || v.Pos() > fn.literal.End()) || v.Parent() == c.Pkg.Scope()
			switch {
			case outside && definition != nil && c.takesTransaction(definition):
				return unknown, always // it may be of the caller's transaction, in which this one is a part
			case outside:
				return past, always
			case definition == nil:
				return unknown, always
			}
			e = definition
		case *ast.CallExpr: // GORM's, another session of the same
			on, is := ast.Unparen(x.Fun).(*ast.SelectorExpr)
			callee := c.callee(x)
			if !is || callee == nil || receiver(callee) == nil || handleOf(receiver(callee)) != madeHandle || handleOf(c.TypesInfo.TypeOf(x)) != madeHandle {
				return unknown, always
			}
			e = on.X
		default:
			return unknown, always
		}
	}
	return unknown, always
}

// takesTransaction reports whether a call is given a transaction: what it makes may be of that.
func (c *checker) takesTransaction(e ast.Expr) (found bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		if arg, is := n.(ast.Expr); is && handleOf(orInvalid(c.TypesInfo.TypeOf(arg))) == txHandle {
			found = true
		}
		return !found
	})
	return found
}

func orInvalid(t types.Type) types.Type {
	if t == nil {
		return types.Typ[types.Invalid]
	}
	return t
}
