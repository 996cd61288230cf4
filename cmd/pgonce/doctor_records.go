package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

func lookAtEpoch(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	epoch, _, err := newStore().Epoch(ctx, pool)
	switch {
	case errors.Is(err, idempotency.ErrSchema), errors.Is(err, idempotency.ErrReadOnly):
		return nil // told already
	case denied(err):
		f.bad("epoch", "GRANT USAGE ON SCHEMA idempotency TO <service>; GRANT SELECT ON idempotency.epoch TO <service>", "may not be read: %v", err)
	case err != nil:
		f.bad("epoch", "INSERT INTO idempotency.epoch DEFAULT VALUES, if its row is gone", "%v", err)
	case strings.HasPrefix(epoch, "row-"):
		f.warn("epoch", "GRANT EXECUTE ON FUNCTION pg_control_system() TO <service>; where the provider does not allow it, "+
			"SELECT idempotency.begin_epoch('failover') belongs into the runbook of every failover",
			"the row alone: the server tells this role neither identifier nor timeline, so a failover is not noticed by itself")
	default:
		f.ok("epoch", "%s", epoch)
	}
	return nil
}

// maxStaleCounted bounds the count.
const maxStaleCounted = 100

func lookAtStale(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	lines, more, err := newStore().List(ctx, pool, &idempotency.ListFilter{State: idempotency.StateTimeout}, maxStaleCounted)
	switch {
	case errors.Is(err, idempotency.ErrSchema):
		return nil
	case err != nil:
		return err
	case len(lines) == 0:
		f.ok("stale records", "none")
		return nil
	}
	count := fmt.Sprint(len(lines))
	if more {
		count = "more than " + count
	}
	manual := 0
	for i := range lines {
		if lines[i].Takeover == idempotency.TakeoverManual {
			manual++
		}
	}
	f.warn("stale records", "pgonce list --state TIMEOUT; the compensator finishes all but those with the rule MANUAL, if it runs",
		"%s, %d of them wait for a person", count, manual)
	return nil
}
