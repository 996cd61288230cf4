package redisfront_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

func newExampleFront(prefix string) (*redisfront.Front, func()) {
	options, err := redis.ParseURL(redisURL)
	if err != nil {
		panic(err)
	}
	options.ContextTimeoutEnabled = true
	client := redis.NewClient(options)
	front, err := redisfront.New(client, &redisfront.Config{Prefix: prefix})
	if err != nil {
		panic(err)
	}
	return front, func() { _ = errors.Join(front.Close(), client.Close()) }
}

func ExampleCacheStates_Move() {
	front, closeAll := newExampleFront("example-states:")
	defer closeAll()
	ctx := context.Background()
	tour, err := idempotency.NewMachine("tour", []string{"offered"}, []string{"offered", "seen", "done"})
	if err != nil {
		panic(err)
	}
	states, err := front.CacheStates(tour, 0)
	if err != nil {
		panic(err)
	}
	user, err := tour.Key(idempotency.SingleTenant, "user-"+rand.Text())
	if err != nil {
		panic(err)
	}
	fmt.Println(states.Move(ctx, user, "req-1", "offered"))
	fmt.Println(states.Move(ctx, user, "req-2", "seen"))
	fmt.Println(states.Move(ctx, user, "req-2", "seen")) // sent again: the same answer
	fmt.Println(states.Move(ctx, user, "req-3", "seen")) // another request for the same
	_, err = states.Move(ctx, user, "req-4", "offered")
	fmt.Println(err)
	// Output:
	// { offered false} <nil>
	// {offered seen false} <nil>
	// {offered seen false} <nil>
	// {seen seen true} <nil>
	// idempotency: transition is not allowed: tour from "seen" to offered (allowed from there: done)
}

func ExampleMirror() {
	front, closeAll := newExampleFront("example-mirror:")
	defer closeAll()
	ctx := context.Background()
	orders, err := idempotency.NewMachine("order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"}, []string{"paid", "refunded"})
	if err != nil {
		panic(err)
	}
	mirror, err := front.Mirror(orders, 0)
	if err != nil {
		panic(err)
	}
	order, err := orders.Key(idempotency.SingleTenant, rand.Text())
	if err != nil {
		panic(err)
	}
	const epoch = "7300000000000000000/1/0" // idempotency.Store.Epoch, in the transaction

	// After COMMIT of what Guard.Move has moved:
	if err := mirror.Set(ctx, order, "shipped", epoch); err != nil {
		panic(err)
	}

	// Before the next transaction, in any process:
	_ = front.Flush(ctx) // only for this example: nobody has to wait
	fmt.Println(mirror.Refuses(ctx, order, "refunded", epoch))
	fmt.Println(mirror.Refuses(ctx, order, "delivered", epoch)) // ask PostgreSQL
	// Output:
	// idempotency: transition is not allowed: order from "shipped" to refunded (allowed from there: delivered)
	// <nil>
}
