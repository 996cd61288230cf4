package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

// keyFlags name one key: by its value, where needed with whose it is and what it is for.
type keyFlags struct{ tenant, operation string }

func (k *keyFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&k.tenant, "tenant", "", `whose key; "`+idempotency.SingleTenant+`" in a program with one tenant`)
	cmd.Flags().StringVar(&k.operation, "operation", "", "what the key is for, for example order.create")
}

func (k *keyFlags) filter(value string) idempotency.KeyFilter {
	return idempotency.KeyFilter{Value: value, Tenant: k.tenant, Operation: k.operation}
}

// full returns the key if all of it is given.
func (k *keyFlags) full(value string) (key idempotency.Key, ok bool, err error) {
	if k.tenant == "" || k.operation == "" {
		return key, false, nil
	}
	key, err = idempotency.NewKey(k.tenant, k.operation, value)
	return key, err == nil, err
}

// one returns the key that is meant. Several that could be meant are a wrong command line: nothing is guessed.
func (k *keyFlags) one(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, value string) (idempotency.Key, error) {
	if key, ok, err := k.full(value); ok || err != nil {
		return key, err
	}
	lines, _, err := s.Find(ctx, pool, k.filter(value), 20)
	switch {
	case err != nil:
		return idempotency.Key{}, err
	case len(lines) == 0:
		return idempotency.Key{}, errNoRecord
	case len(lines) > 1:
		names := make([]string, 0, len(lines))
		for i := range lines {
			names = append(names, fmt.Sprintf("--tenant %s --operation %s", lines[i].Key.Tenant(), lines[i].Key.Operation()))
		}
		return idempotency.Key{}, usagef("several records have this key, say which one: %s", strings.Join(names, ", or "))
	}
	return lines[0].Key, nil
}

var errNoRecord = errors.New("there is no record of this key: it was never used, its operation failed without an outcome, it was purged, " +
	"or it was executed while a policy was off (pgonce policy bypassed)")
