package vet

import (
	"go/types"
	"slices"
	"strings"
)

const (
	pgonce   = "github.com/pgonce/pgonce/"
	txnPath  = pgonce + "txn"
	txnSQL   = pgonce + "txnsql"
	hubPath  = pgonce + "idempotency"
	httpPath = pgonce + "idempotencyhttp"
	msgPath  = pgonce + "idempotencymsg"
	pgxPath  = "github.com/jackc/pgx/v5"
	poolPath = pgxPath + "/pgxpool"
	sqlPath  = "database/sql"
	sqlxPath = "github.com/jmoiron/sqlx"
	gormPath = "gorm.io/gorm"
	netHTTP  = "net/http"
	grpcPath = "google.golang.org/grpc"
	connPath = "connectrpc.com/connect"
)

// opaque packages are known by what is said of them here, and not looked into.
func opaque(path string) bool {
	for _, known := range []string{pgxPath, gormPath, sqlxPath} {
		if path == known || strings.HasPrefix(path, known+"/") {
			return true
		}
	}
	return strings.HasPrefix(path, pgonce+"idempotencygrpc") ||
		slices.Contains([]string{
			txnPath, txnSQL, hubPath, httpPath, msgPath, pgonce + "redisfront", pgonce + "localfront", pgonce + "compensator",
			pgonce + "ids", hubPath + "/idempotencytest",
		}, path)
}

// statements are the methods by which anything is asked of a database.
var statements = []string{
	"Exec", "Query", "QueryRow", "SendBatch", "CopyFrom", "Begin", "BeginTx", "Prepare", "Ping",
	"Acquire", "AcquireFunc", "AcquireAllIdle", "BeginFunc", "BeginTxFunc", "Conn",
	"ExecContext", "QueryContext", "QueryRowContext", "PrepareContext", "PingContext",
}

// ofLibraries are those of sqlx and of GORM, by which they ask.
var ofLibraries = []string{
	"Get", "Select", "NamedExec", "NamedQuery", "Queryx", "QueryRowx", "MustExec", "Beginx", "MustBegin", "Preparex", "PrepareNamed", "Connx",
	"GetContext", "SelectContext", "NamedExecContext", "NamedQueryContext", "QueryxContext", "QueryRowxContext", "MustExecContext",
	"BeginTxx", "MustBeginTx", "PreparexContext", "PrepareNamedContext",
	"Create", "CreateInBatches", "Save", "First", "Take", "Last", "Find", "FindInBatches", "FirstOrInit", "FirstOrCreate", "Update",
	"Updates", "UpdateColumn", "UpdateColumns", "Delete", "Count", "Row", "Rows", "Scan", "Pluck", "Connection", "Transaction", "AutoMigrate",
}

// handle says what a type is to a function: a way past its transaction, a connection that may be its own, or a transaction.
type handle int

const (
	noHandle handle = iota
	pastHandle
	connHandle
	txHandle
	madeHandle // of what it was made with: GORM's, a prepared statement
)

func handleOf(t types.Type) handle {
	if p, is := types.Unalias(t).(*types.Pointer); is {
		t = p.Elem()
	}
	n, is := types.Unalias(t).(*types.Named)
	if !is || n.Obj().Pkg() == nil {
		return noHandle
	}
	switch n.Obj().Pkg().Path() + "." + n.Obj().Name() {
	case poolPath + ".Pool", poolPath + ".Conn", sqlPath + ".DB", sqlPath + ".Conn", sqlxPath + ".DB", sqlxPath + ".Conn":
		return pastHandle
	case pgxPath + ".Conn":
		return connHandle
	case pgxPath + ".Tx", sqlPath + ".Tx":
		return txHandle
	case gormPath + ".DB", sqlPath + ".Stmt":
		return madeHandle
	}
	return noHandle
}

// embedsPool reports whether a struct asks through a pool or a connection that is embedded in it.
func embedsPool(t types.Type) bool {
	if t == nil {
		return false
	}
	for _, method := range []string{"Begin", "Exec", "ExecContext"} {
		obj, index, _ := types.LookupFieldOrMethod(t, true, nil, method)
		if fn, is := obj.(*types.Func); is && len(index) > 1 && handleOf(receiver(fn)) == pastHandle {
			return true
		}
	}
	return false
}

// receiver is a method's, nil for a function.
func receiver(fn *types.Func) types.Type {
	if recv := fn.Signature().Recv(); recv != nil {
		return recv.Type()
	}
	return nil
}

// isNamed reports whether t is that type of that package, or a pointer to it.
func isNamed(t types.Type, path, name string) bool {
	if p, is := types.Unalias(t).(*types.Pointer); is {
		t = p.Elem()
	}
	n, is := types.Unalias(t).(*types.Named)
	return is && n.Obj().Pkg() != nil && n.Obj().Pkg().Path() == path && n.Obj().Name() == name
}

// fromContext reports whether fn gives a function its transaction: the FromContext of txn, or of txnsql.
func fromContext(fn *types.Func) bool {
	return fn != nil && (named(fn, txnPath, "FromContext") || named(fn, txnSQL, "FromContext"))
}

// named reports whether fn is that function of that package.
func named(fn *types.Func, path, name string) bool {
	return fn.Pkg() != nil && fn.Pkg().Path() == path && fn.Name() == name
}

// asks reports whether an interface is one through which SQL is sent: sqlc's DBTX, or a beginner's.
func asks(t types.Type) bool {
	i, is := t.Underlying().(*types.Interface)
	if !is {
		return false
	}
	for m := range i.Methods() {
		if sends(m) {
			return true
		}
	}
	return false
}

// sends reports whether a method of an interface sends SQL: by its name, and because what it returns is pgx's or database/sql's.
func sends(m *types.Func) bool {
	if !slices.Contains(statements, m.Name()) {
		return false
	}
	for v := range m.Signature().Results().Variables() {
		t := v.Type()
		if p, is := types.Unalias(t).(*types.Pointer); is {
			t = p.Elem()
		}
		if n, is := types.Unalias(t).(*types.Named); is && n.Obj().Pkg() != nil {
			if path := n.Obj().Pkg().Path(); path == sqlPath || path == pgxPath || strings.HasPrefix(path, pgxPath+"/") {
				return true
			}
		}
	}
	return false
}

// asksBy reports whether a method asks a database.
func asksBy(method *types.Func) bool {
	h := handleOf(receiver(method))
	return slices.Contains(statements, method.Name()) && (h != noHandle || sends(method)) ||
		slices.Contains(ofLibraries, method.Name()) && (h == pastHandle || h == madeHandle)
}

// away reports whether fn calls another service.
func away(fn *types.Func) bool {
	if fn.Pkg() == nil {
		return false
	}
	if fn.Pkg().Path() == netHTTP {
		switch r := receiver(fn); {
		case r == nil:
			return slices.Contains([]string{"Get", "Head", "Post", "PostForm"}, fn.Name())
		case strings.HasSuffix(types.TypeString(r, nil), "net/http.Client"):
			return slices.Contains([]string{"Do", "Get", "Head", "Post", "PostForm"}, fn.Name())
		default:
			return fn.Name() == "RoundTrip"
		}
	}
	if r := receiver(fn); r != nil && fn.Signature().Params().Len() == 2 {
		// A generated Connect client is an interface with the methods of the handlers', and those are no interface where they are called.
		request := fn.Signature().Params().At(1).Type()
		if isNamed(request, connPath, "Request") && (types.IsInterface(r) || isNamed(r, connPath, "Client")) {
			return true
		}
	}
	// A method of a generated gRPC client, also called through its interface.
	if params := fn.Signature().Params(); fn.Signature().Variadic() && receiver(fn) != nil {
		last := params.At(params.Len() - 1).Type().(*types.Slice).Elem()
		n, is := types.Unalias(last).(*types.Named)
		return is && n.Obj().Pkg() != nil && n.Obj().Pkg().Path() == grpcPath && n.Obj().Name() == "CallOption"
	}
	return false
}
