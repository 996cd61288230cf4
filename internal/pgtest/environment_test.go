package pgtest

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestEnvironment_EveryWordIsUnderstoodOrRefused(t *testing.T) {
	t.Parallel()
	env, err := parseEnvironment("pooler=pgbouncer mode=exec conns=2 isolation=repeatable_read timezone=Asia/Kathmandu clock=-1h")
	require.NoError(t, err)
	require.Equal(t, Environment{
		Pooler: true, Mode: "exec", Conns: 2, Isolation: pgx.RepeatableRead, TimeZone: "Asia/Kathmandu", ClockOffset: -time.Hour,
	}, env)
	for _, wrong := range []string{
		"pooler", "pooler=odyssey", "mode=simple_protocol", "mode=", "conns=0", "conns=many", "isolation=", "timezone=Nowhere/Land",
		"clock=soon", "fast=yes",
	} {
		_, err := parseEnvironment("conns=1 " + wrong)
		require.ErrorContains(t, err, wrong)
	}
}
