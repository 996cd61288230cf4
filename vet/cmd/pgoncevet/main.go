// Command pgoncevet finds functions of package txn that go past their transaction, by itself or for go vet:
//
//	pgoncevet ./...
//	go vet -vettool=$(which pgoncevet) ./...
package main

import (
	"golang.org/x/tools/go/analysis/singlechecker"

	"github.com/pgonce/pgonce/vet"
)

func main() { singlechecker.Main(vet.Analyzer) }
