package ids_test

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/ids"
)

func ExampleOrderID() {
	at := time.UnixMilli(1772366400123)
	id := ids.OrderID("c-7", "sku-9", at)
	fmt.Println(id, ids.Verify(id, "c-7", "sku-9", at), ids.Verify(id, "c-8", "sku-9", at))
	// Output: SQRS5Z29F8QST true false
}

func ExampleTokens() {
	secret := bytes.Repeat([]byte{1}, 32) // 32 random bytes from where the program keeps its secrets
	tokens, err := ids.NewTokens(&ids.TokensConfig{Keys: []ids.TokenKey{{ID: "2026-a", Secret: secret}}})
	if err != nil {
		panic(err)
	}
	value := tokens.Make("acme", "order.create") // txn.Issue does it
	fmt.Println(tokens.Verify("acme", "order.create", value))
	fmt.Println(errors.Is(tokens.Verify("acme", "order.cancel", value), idempotency.ErrNotIssued))
	// Output:
	// <nil>
	// true
}
