package vet

import (
	"go/ast"
	"go/types"

	"golang.org/x/tools/go/types/typeutil"
)

// entry says which arguments of a function run in a transaction, and which run outside one.
type entry struct{ inside, free int }

var entries = map[string]entry{
	txnPath + ".WithIdempotency":     {3, -1},
	txnPath + ".WithIdempotencyTx":   {4, -1},
	txnPath + ".WithIdempotencyMany": {3, -1},
	txnPath + ".WithLease":           {4, 3},
	txnSQL + ".WithIdempotency":      {3, -1},
	txnSQL + ".WithIdempotencyTx":    {4, -1},
	txnSQL + ".WithIdempotencyMany":  {3, -1},
	txnSQL + ".WithLease":            {4, 3},
	httpPath + ".OnCommit":           {1, -1},
}

// findRoots collects the functions that run in a transaction.
func (c *checker) findRoots() {
	for _, file := range c.Files {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				c.rootsOfCall(n)
			case *ast.CompositeLit:
				for _, element := range n.Elts {
					if kv, is := element.(*ast.KeyValueExpr); is {
						if field, is := kv.Key.(*ast.Ident); is && messageHandler(c.TypesInfo.TypeOf(field)) {
							c.root(kv.Value)
						}
					}
				}
			case *ast.AssignStmt:
				for i, to := range n.Lhs {
					if _, field := to.(*ast.SelectorExpr); field && i < len(n.Rhs) && messageHandler(c.TypesInfo.TypeOf(to)) {
						c.root(n.Rhs[i])
					}
				}
			case *ast.FuncDecl:
				if obj, is := c.TypesInfo.Defs[n.Name].(*types.Func); is && n.Body != nil && (resolverCommit(obj) || c.takesFromContext(n.Body)) {
					c.rootDecl(obj)
				}
			case *ast.FuncLit:
				if c.takesFromContext(n.Body) {
					c.rootLiteral(n)
				}
			}
			return true
		})
	}
}

// takesFromContext reports whether a function itself takes its transaction from its context: a handler, of whatever calls it. To
// ask only whether there is one is no such thing.
func (c *checker) takesFromContext(body *ast.BlockStmt) (found bool) {
	ast.Inspect(body, func(n ast.Node) bool {
		if assign, is := n.(*ast.AssignStmt); is && len(assign.Rhs) == 1 {
			if call, is := assign.Rhs[0].(*ast.CallExpr); is {
				fn := c.callee(call)
				to, is := assign.Lhs[0].(*ast.Ident)
				found = found || fromContext(fn) && is && to.Name != "_"
			}
		}
		_, literal := n.(*ast.FuncLit)
		return !found && !literal
	})
	return found
}

func (c *checker) rootsOfCall(call *ast.CallExpr) {
	if c.TypesInfo.Types[call.Fun].IsType() {
		if messageHandler(c.TypesInfo.TypeOf(call)) {
			c.root(call.Args[0])
		}
		return
	}
	if wrapper := c.resolve(call.Fun); wrapper != nil {
		if made, is := wrapper.(*ast.CallExpr); is && len(call.Args) == 1 {
			fn := c.callee(made)
			if fn != nil && fn.Pkg() != nil && fn.Pkg().Path() == httpPath && (fn.Name() == "Operation" || fn.Name() == "OperationOf") {
				c.httpRoot(call.Args[0])
			}
		}
	}
	fn := c.callee(call)
	if fn == nil || fn.Pkg() == nil {
		return
	}
	if e, is := entries[fn.Pkg().Path()+"."+fn.Name()]; is && receiver(fn) == nil && len(call.Args) > e.inside {
		c.root(call.Args[e.inside])
		if named(fn, txnSQL, "WithIdempotencyTx") {
			c.sameTransaction(call.Args[2], call.Args[e.inside])
		}
		if e.free >= 0 {
			if literal, is := c.resolve(call.Args[e.free]).(*ast.FuncLit); is {
				c.free[literal] = true
			}
		}
		return
	}
	params := fn.Signature().Params()
	for i := range min(params.Len(), len(call.Args)) {
		if messageHandler(params.At(i).Type()) {
			c.root(call.Args[i])
		}
	}
}

// callee is the function that a call calls, if it can be told.
func (c *checker) callee(call *ast.CallExpr) *types.Func {
	// A method value in a variable is called like the method.
	if fn, is := typeutil.Callee(c.TypesInfo, &ast.CallExpr{Fun: c.resolve(call.Fun)}).(*types.Func); is {
		return fn.Origin()
	}
	return nil
}

// resolve follows variables with one definition.
func (c *checker) resolve(e ast.Expr) ast.Expr {
	for range 10 { // no definition leads in a circle, but who knows
		e = ast.Unparen(e)
		switch x := e.(type) {
		case *ast.Ident:
			v, is := c.TypesInfo.ObjectOf(x).(*types.Var)
			if !is || c.definitions[v] == nil {
				return e
			}
			e = c.definitions[v]
		case *ast.CallExpr:
			if !c.TypesInfo.Types[x.Fun].IsType() || len(x.Args) != 1 {
				return e
			}
			e = x.Args[0] // a conversion
		case *ast.IndexExpr: // an instance
			if _, is := c.TypesInfo.TypeOf(x.X).(*types.Signature); !is {
				return e
			}
			e = x.X
		case *ast.IndexListExpr:
			e = x.X
		default:
			return e
		}
	}
	return e
}

// root notes a function that runs in a transaction.
func (c *checker) root(e ast.Expr) {
	switch x := c.resolve(e).(type) {
	case *ast.FuncLit:
		c.rootLiteral(x)
	case *ast.Ident:
		if v, is := c.TypesInfo.Uses[x].(*types.Var); is {
			c.runs(v)
			return
		}
		c.rootNamed(e, c.TypesInfo.Uses[x])
	case *ast.SelectorExpr:
		c.rootNamed(e, c.TypesInfo.Uses[x.Sel])
	case *ast.CallExpr: // a function of this package that makes one
		if maker := c.callee(x); maker != nil && c.decls[maker] != nil {
			ast.Inspect(c.decls[maker].body, func(n ast.Node) bool {
				if r, is := n.(*ast.ReturnStmt); is {
					for _, result := range r.Results {
						if literal, is := ast.Unparen(result).(*ast.FuncLit); is {
							c.rootLiteral(literal)
						}
					}
				}
				_, literal := n.(*ast.FuncLit)
				return !literal
			})
		}
	}
}

func (c *checker) rootLiteral(literal *ast.FuncLit) {
	if !c.free[literal] {
		c.free[literal] = true
		c.roots = append(c.roots, &function{literal: literal, body: literal.Body, params: c.params(literal), isRoot: true})
	}
}

// sameTransaction: the function of txnsql.WithIdempotencyTx gets the caller's transaction itself, so that may be used by either name.
func (c *checker) sameTransaction(outer, given ast.Expr) {
	id, is := ast.Unparen(outer).(*ast.Ident)
	if !is {
		return
	}
	if v, is := c.TypesInfo.ObjectOf(id).(*types.Var); is {
		for _, root := range c.roots {
			if root.literal != nil && c.resolve(given) == ast.Expr(root.literal) {
				root.params[v] = 1
			}
		}
	}
}

// rootNamed: of another package only what it does is known, so that is said where it is given.
func (c *checker) rootNamed(at ast.Expr, obj types.Object) {
	fn, is := obj.(*types.Func)
	if !is {
		return
	}
	fn = fn.Origin()
	if c.decls[fn] != nil {
		c.rootDecl(fn)
		return
	}
	if e := c.effectsOf(fn); e != nil {
		for _, one := range e.Always {
			if !c.allowed.accepts(c.Fset.Position(at.Pos()), one.Kind) {
				c.report(finding{pos: at.Pos(), effect: one, via: fn.Name(), param: always})
			}
		}
	}
}

func (c *checker) rootDecl(fn *types.Func) {
	if d := c.decls[fn]; d != nil && !d.isRoot {
		d.isRoot = true
		c.roots = append(c.roots, d)
	}
}

// httpRoot is root for an http.Handler.
func (c *checker) httpRoot(e ast.Expr) {
	if _, is := c.TypesInfo.TypeOf(c.resolve(e)).Underlying().(*types.Signature); is {
		c.root(e)
		return
	}
	obj, _, _ := types.LookupFieldOrMethod(c.TypesInfo.TypeOf(e), true, c.Pkg, "ServeHTTP")
	if fn, is := obj.(*types.Func); is && !types.IsInterface(receiver(fn)) {
		c.rootNamed(e, fn)
	}
}

// messageHandler reports whether t is idempotencymsg's type of a handler.
func messageHandler(t types.Type) bool {
	named, is := types.Unalias(t).(*types.Named)
	return is && named.Obj().Pkg() != nil && named.Obj().Pkg().Path() == msgPath && (named.Obj().Name() == "Handler" || named.Obj().Name() == "DeadLetter")
}

// resolverCommit reports whether fn is the Commit of an idempotency.Resolver.
func resolverCommit(fn *types.Func) bool {
	params := fn.Signature().Params()
	return fn.Name() == "Commit" && receiver(fn) != nil && params.Len() == 4 && handleOf(params.At(1).Type()) == txHandle &&
		types.TypeString(params.At(3).Type(), nil) == hubPath+".Resolution"
}
