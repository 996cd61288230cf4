package vet

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strings"
)

// scan looks through a function, and through the literals in it that run with it.
func (c *checker) scan(fn *function, found func(finding)) {
	elsewhere := c.elsewhere(fn)
	inside := found
	found = func(f finding) {
		if !slices.ContainsFunc(elsewhere, func(r span) bool { return r.from <= f.pos && f.pos < r.to }) {
			inside(f)
		}
	}
	emit := func(pos token.Pos, k kind, param int, what string) {
		c.emit(found, finding{pos: pos, effect: effect{Kind: k, What: what}, param: param})
	}
	ast.Inspect(fn.body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return !c.free[n]
		case *ast.GoStmt:
			if fn.isRoot && c.mentionsTransaction(n) {
				emit(n.Pos(), kindTx, always, "gives the transaction to a goroutine, which may outlive it")
			}
		case *ast.CallExpr:
			c.scanCall(fn, n, found, emit)
		}
		return true
	})
}

// span is a piece of a file.
type span struct{ from, to token.Pos }

// elsewhere is the code that txn.FromContext has sent to where no function runs: behind "if !ok", in the else of "if ok", and
// after an "if ok" that returns.
func (c *checker) elsewhere(fn *function) (spans []span) {
	ast.Inspect(fn.body, func(n ast.Node) bool {
		block, is := n.(*ast.BlockStmt)
		if !is {
			return true
		}
		for _, stmt := range block.List {
			branch, is := stmt.(*ast.IfStmt)
			if !is {
				continue
			}
			switch asked, negated := c.asksForTransaction(branch.Cond); {
			case asked && negated:
				spans = append(spans, span{branch.Body.Pos(), branch.Body.End()})
			case asked && branch.Else != nil:
				spans = append(spans, span{branch.Else.Pos(), branch.Else.End()})
			case asked && len(branch.Body.List) > 0:
				if leaves(branch.Body.List[len(branch.Body.List)-1]) {
					spans = append(spans, span{branch.End(), block.End()})
				}
			}
		}
		return true
	})
	return spans
}

// leaves reports whether a statement is the last of its function.
func leaves(stmt ast.Stmt) bool {
	if expr, is := stmt.(*ast.ExprStmt); is {
		call, is := expr.X.(*ast.CallExpr)
		if !is {
			return false
		}
		id, is := call.Fun.(*ast.Ident)
		return is && id.Name == "panic"
	}
	_, returns := stmt.(*ast.ReturnStmt)
	return returns
}

// asksForTransaction reports whether a condition is the second result of txn.FromContext.
func (c *checker) asksForTransaction(cond ast.Expr) (asked, negated bool) {
	cond = ast.Unparen(cond)
	if not, is := cond.(*ast.UnaryExpr); is && not.Op == token.NOT {
		cond, negated = ast.Unparen(not.X), true
	}
	id, is := cond.(*ast.Ident)
	if !is {
		return false, false
	}
	v, is := c.TypesInfo.ObjectOf(id).(*types.Var)
	if !is {
		return false, false
	}
	call, is := c.definitions[v].(*ast.CallExpr)
	if !is {
		return false, false
	}
	return fromContext(c.callee(call)), negated
}

func (c *checker) emit(found func(finding), f finding) {
	if !c.allowed.accepts(c.Fset.Position(f.pos), f.Kind) {
		found(f)
	}
}

func (c *checker) scanCall(fn *function, call *ast.CallExpr, found func(finding), emit func(token.Pos, kind, int, string)) {
	callee := c.callee(call)
	if callee == nil {
		c.scanClosure(fn, call, found)
		return
	}
	if away(callee) {
		emit(call.Pos(), kindHTTP, always, "calls "+name(callee))
		return
	}
	if selector, is := c.resolve(call.Fun).(*ast.SelectorExpr); is && receiver(callee) != nil {
		c.scanMethod(fn, call, selector.X, callee, emit)
	}
	c.scanArguments(fn, call, callee, emit)
	if e := c.effectsOf(callee); e != nil {
		c.follow(fn, call, e, callee.Name(), found)
	}
}

// follow says of a call what is known of the function that it calls.
func (c *checker) follow(fn *function, call *ast.CallExpr, e *effects, via string, found func(finding)) {
	for _, one := range e.Always {
		c.emit(found, finding{pos: call.Pos(), effect: one, via: via, param: always})
	}
	for _, p := range e.Params {
		given := c.given(call, p.Index)
		if given == nil {
			continue
		}
		f := finding{pos: call.Pos(), effect: p.Effect, via: via, param: always}
		origin, param := c.classify(fn, given)
		if origin == unknown && p.Effect.Kind == kindPool {
			origin, param = c.madeBefore(fn, given)
		}
		switch {
		case origin == ofParam:
			f.param = param
			if p.Effect.Kind == kindTx && fn.isRoot && handleOf(c.TypesInfo.TypeOf(given)) == txHandle {
				f.param = always
			}
		case p.Effect.Kind == kindTx && (!fn.isRoot || origin != ofFunction), p.Effect.Kind == kindPool && origin != past:
			continue
		}
		c.emit(found, f)
	}
}

// given is the argument of that index, or what a method is called on.
func (c *checker) given(call *ast.CallExpr, index int) ast.Expr {
	if index == ofReceiver {
		if selector, is := c.resolve(call.Fun).(*ast.SelectorExpr); is {
			return selector.X
		}
		return nil
	}
	if index >= len(call.Args) {
		return nil
	}
	return call.Args[index]
}

// name is a function's, short: (*pgxpool.Pool).Exec.
func name(fn *types.Func) string {
	short := func(p *types.Package) string { return p.Name() }
	if r := receiver(fn); r != nil {
		return fmt.Sprintf("(%s).%s", types.TypeString(r, short), fn.Name())
	}
	return fn.Pkg().Name() + "." + fn.Name()
}

var endsTransaction = regexp.MustCompile(`(?i)^\s*(commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(\s+(work|transaction))?\s*(;|$|and\b))`)

func (c *checker) scanMethod(fn *function, call *ast.CallExpr, on ast.Expr, callee *types.Func, emit func(token.Pos, kind, int, string)) {
	asked := asksBy(callee)
	origin, param := c.classify(fn, on)
	if origin == unknown && handleOf(receiver(callee)) == pastHandle {
		origin = past // a struct that embeds one
	}
	switch handleOf(receiver(callee)) {
	case pastHandle, connHandle:
		switch {
		case !asked || callee.Name() == "Conn" && handleOf(receiver(callee)) != pastHandle:
		case origin == past:
			emit(call.Pos(), kindPool, always, "calls "+name(callee))
		case origin == ofParam:
			emit(call.Pos(), kindPool, param, "calls "+name(callee))
		}
	case txHandle:
		switch ending := callee.Name() == "Commit" || callee.Name() == "Rollback"; {
		case fn.literal != nil && origin == captured:
			emit(call.Pos(), kindTx, always, "uses a transaction from around it")
		case !ending && !c.endsBySQL(call, callee):
		case origin == ofParam && !fn.isRoot:
			emit(call.Pos(), kindTx, param, "ends the transaction")
		case origin == ofParam, origin == ofFunction:
			emit(call.Pos(), kindTx, always, "ends the transaction")
		}
	case noHandle, madeHandle:
		if !asked || !types.IsInterface(receiver(callee)) && handleOf(receiver(callee)) != madeHandle {
			return
		}
		if origin == unknown {
			origin, param = c.madeBefore(fn, on)
		}
		switch origin {
		case past:
			emit(call.Pos(), kindPool, always, "calls "+name(callee)+" of what was there before the transaction")
		case ofParam:
			emit(call.Pos(), kindPool, param, "calls its "+callee.Name())
		}
	}
}

// endsBySQL reports whether the first text that a method is given ends the transaction.
func (c *checker) endsBySQL(call *ast.CallExpr, callee *types.Func) bool {
	params := callee.Signature().Params()
	for i := range min(params.Len(), len(call.Args)) {
		if b, is := params.At(i).Type().(*types.Basic); is && b.Kind() == types.String {
			sql := c.TypesInfo.Types[call.Args[i]].Value
			return sql != nil && sql.Kind() == constant.String && endsTransaction.MatchString(constant.StringVal(sql))
		}
	}
	return false
}

// scanArguments sees a pool that is given to something which asks of an interface: sqlc's New, pgx.BeginFunc.
func (c *checker) scanArguments(fn *function, call *ast.CallExpr, callee *types.Func, emit func(token.Pos, kind, int, string)) {
	params := callee.Signature().Params()
	for i := range min(params.Len(), len(call.Args)) {
		if handleOf(c.TypesInfo.TypeOf(call.Args[i])) == txHandle && fn.literal != nil {
			if origin, _ := c.classify(fn, call.Args[i]); origin == captured {
				emit(call.Pos(), kindTx, always, "gives "+name(callee)+" a transaction from around it")
			}
			continue
		}
		if callee.Signature().Variadic() && i == params.Len()-1 || !asks(params.At(i).Type()) || handleOf(params.At(i).Type()) == txHandle {
			continue
		}
		origin, param := c.classify(fn, call.Args[i])
		if origin == unknown && embedsPool(c.TypesInfo.TypeOf(call.Args[i])) {
			origin = past
		}
		switch origin {
		case past:
			emit(call.Pos(), kindPool, always, "gives a pool or a connection to "+name(callee))
		case ofParam:
			if callee.Pkg() != c.Pkg && handleOf(c.TypesInfo.TypeOf(call.Args[i])) != txHandle && strings.HasPrefix(callee.Pkg().Path(), pgxPath) {
				emit(call.Pos(), kindPool, param, "gives it to "+name(callee))
			}
		}
	}
}

// mentionsTransaction reports whether a statement uses a transaction that was there before it.
func (c *checker) mentionsTransaction(stmt *ast.GoStmt) (found bool) {
	ast.Inspect(stmt, func(n ast.Node) bool {
		if id, is := n.(*ast.Ident); is {
			v, is := c.TypesInfo.Uses[id].(*types.Var)
			found = found || is && !v.IsField() && handleOf(v.Type()) == txHandle && v.Pos() < stmt.Pos()
		}
		return !found
	})
	return found
}
