package main

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/internal/devstack"
)

// printGuide tells what to try while the service is up.
func (d *demo) printGuide(instances []*instance, t *servers) {
	base := instances[0].base
	orders := base.JoinPath("/orders").String()
	_, _ = fmt.Fprintf(d.out, `
The order service listens on %[5]s
Try, in another terminal:

1. An order: 201.
  curl -i %[2]s -H 'Idempotency-Key: my-first' -d '{"customer":"c-7","sku":"coffee","quantity":2}'
2. The same again, as after a timeout: the same bytes, %[3]s: true, and who gave it.
  curl -i %[2]s -H 'Idempotency-Key: my-first' -d '{"customer":"c-7","sku":"coffee","quantity":2}'
3. The same key for another order: 422.
  curl -i %[2]s -H 'Idempotency-Key: my-first' -d '{"customer":"c-7","sku":"coffee","quantity":3}'

  With "sku":"unicorn" it is out of stock: a 400, and the same 400 again. "coupon":"WELCOME" can be used once.
  curl %[1]s/stock/coffee shows what is left, curl %[1]s/orders/1 an order. It is created, then paid, shipped, delivered, or
  paid and refunded:
  curl -i -X POST %[1]s/orders/1/pay -H 'Idempotency-Key: my-payment' -d '{"card":"4242"}'
  curl -i -X PUT %[1]s/orders/1/status -d '{"status":"shipped"}'
  The cards "refused", "away" and "slow" are what they say, "sku":"handmade" takes 5 s. A checkout needs a token as its key:
  curl -X POST %[1]s/checkout/tokens
  curl %[1]s/openapi.yaml describes all of it.

Look into the tables:

  psql %[4]s \
    -c 'SELECT key, state, age, duration, result, error FROM idempotency.audit ORDER BY created_at DESC LIMIT 10' \
    -c 'SELECT * FROM demo.orders ORDER BY id DESC LIMIT 10'

`, base, orders, idempotencyhttp.HeaderReplayed, psqlArgument(t.database, t.stack.Provider()), addresses(instances))
	if len(instances) > 1 {
		_, _ = fmt.Fprint(d.out, "A key is one order, whichever of the instances is asked.\n\n")
	}
	if t.redis != nil && !t.redis.foreign {
		_, _ = fmt.Fprintf(d.out, "Look into Redis:\n\n  redis-cli --no-auth-warning -u '%s' --scan --pattern '%s*' | head\n\n",
			redisArgument(t.redis.url), t.redis.prefix)
	}
	if d.unsafe {
		_, _ = fmt.Fprint(d.out, "But this is -unsafe: nobody looks at the key, and the second command makes a second order.\n\n")
	}
}

// addresses lists where the instances are reached.
func addresses(instances []*instance) string {
	all := make([]string, len(instances))
	for n, i := range instances {
		all[n] = i.base.String()
	}
	return strings.Join(all, ", ")
}

// redisArgument is the URL of a throw-away Redis as redis-cli wants it: with the user's name, which is default.
func redisArgument(address string) string {
	u, err := url.Parse(address)
	if err != nil || u.User == nil {
		return address
	}
	if password, has := u.User.Password(); has && u.User.Username() == "" {
		u.User = url.UserPassword("default", password)
	}
	return u.String()
}

// psqlArgument is the database as a shell reads it. The password of a throw-away server nobody knows but us; one that
// somebody else gave us is not shown, and psql asks for it.
func psqlArgument(database *devstack.Database, provider string) string {
	given, err := url.Parse(database.URL)
	switch {
	case provider != devstack.ProviderEnv:
		return "'" + database.URL + "'"
	case err != nil || given.Scheme == "":
		// Keywords and values. Of two dbname the last one counts.
		return `"$PGONCE_DATABASE_URL dbname=` + database.Name + `"`
	}
	if given.User != nil {
		given.User = url.User(given.User.Username())
	}
	query := given.Query()
	query.Del("password")
	given.RawQuery = query.Encode()
	return "'" + strings.ReplaceAll(given.String(), "'", "%27") + "'"
}
