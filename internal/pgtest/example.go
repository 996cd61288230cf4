package pgtest

import (
	"context"

	"github.com/pgonce/pgonce/internal/devstack"
)

// ExampleURL is URL for an Example, which has no testing.TB: it panics where URL fails, and its caller drops.
func ExampleURL() (url string, drop func()) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	ctx := context.Background()
	stack, err := server()
	must(err)
	original, err := template()
	must(err)
	var database *devstack.Database
	database, err = stack.CreateFromTemplate(ctx, original.Name)
	must(err)
	return database.URL, func() { must(database.Drop(ctx)) }
}
