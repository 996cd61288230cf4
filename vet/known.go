package vet

import (
	"go/types"
	"slices"
	"strings"
)

const (
	pgonce   = "github.com/pgonce/pgonce/"
	txnPath  = pgonce + "txn"
	hubPath  = pgonce + "idempotency"
	httpPath = pgonce + "idempotencyhttp"
	msgPath  = pgonce + "idempotencymsg"
	pgxPath  = "github.com/jackc/pgx/v5"
	poolPath = pgxPath + "/pgxpool"
	sqlPath  = "database/sql"
	netHTTP  = "net/http"
	grpcPath = "google.golang.org/grpc"
)

// opaque packages are known by what is said of them here, and not looked into.
func opaque(path string) bool {
	return path == pgxPath || strings.HasPrefix(path, pgxPath+"/") ||
		slices.Contains([]string{
			txnPath, hubPath, httpPath, msgPath, pgonce + "redisfront", pgonce + "localfront", pgonce + "compensator",
			pgonce + "idempotencygrpc", pgonce + "ids", hubPath + "/idempotencytest",
		}, path)
}

// statements are the methods by which anything is asked of a database.
var statements = []string{
	"Exec", "Query", "QueryRow", "SendBatch", "CopyFrom", "Begin", "BeginTx", "Prepare", "Ping",
	"Acquire", "AcquireFunc", "AcquireAllIdle", "BeginFunc", "BeginTxFunc", "Conn",
	"ExecContext", "QueryContext", "QueryRowContext", "PrepareContext", "PingContext",
}

// handle says what a type is to a function: a way past its transaction, a connection that may be its own, or a transaction.
type handle int

const (
	noHandle handle = iota
	pastHandle
	connHandle
	txHandle
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
	case poolPath + ".Pool", poolPath + ".Conn", sqlPath + ".DB", sqlPath + ".Conn":
		return pastHandle
	case pgxPath + ".Conn":
		return connHandle
	case pgxPath + ".Tx":
		return txHandle
	}
	return noHandle
}

// receiver is a method's, nil for a function.
func receiver(fn *types.Func) types.Type {
	if recv := fn.Signature().Recv(); recv != nil {
		return recv.Type()
	}
	return nil
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
	// A method of a generated gRPC client, also called through its interface.
	if params := fn.Signature().Params(); fn.Signature().Variadic() && receiver(fn) != nil {
		last := params.At(params.Len() - 1).Type().(*types.Slice).Elem()
		n, is := types.Unalias(last).(*types.Named)
		return is && n.Obj().Pkg() != nil && n.Obj().Pkg().Path() == grpcPath && n.Obj().Name() == "CallOption"
	}
	return false
}
