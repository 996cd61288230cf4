package db_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// A policy's actor and reason are of its last change, or nobody's: never of a change before.
func TestPolicies_ActorIsOfTheLastChange(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	exec := func(sql string) error {
		_, err := conn.Exec(t.Context(), sql)
		return err
	}
	blamed := func() string {
		t.Helper()
		return column[string](t, conn, `SELECT concat_ws(' ', p.enforcement, COALESCE(p.actor, '?'), COALESCE(p.reason, '?'), 'logged',
			COALESCE(c.actor, '?'), COALESCE(c.reason, '?'))
			FROM idempotency.policies AS p JOIN idempotency.policy_changes AS c USING (scope, name) ORDER BY c.id DESC LIMIT 1`)[0]
	}
	const set = `UPDATE idempotency.policies SET `
	require.NoError(t, exec(`INSERT INTO idempotency.policies (scope, actor, reason) VALUES ('all', 'ada', 'release')`))
	require.Equal(t, "enforce ada release logged ada release", blamed())
	for _, step := range []struct{ sql, want string }{
		{set + `enforcement = 'shadow'`, "shadow ? ? logged ? ?"},
		{set + `enforcement = 'off', actor = 'bob', reason = 'incident'`, "off bob incident logged bob incident"},
		{set + `wait = '1 s', actor = 'bob', reason = 'incident'`, "off bob incident logged bob incident"}, // the same again
		{set + `actor = actor, reason = 'still'`, "off bob still logged bob still"},
		{set + `enforcement = 'enforce', actor = 'eve'`, "enforce eve ? logged eve ?"},
		{set + `enforcement = 'shadow', reason = 'tests'`, "shadow ? tests logged ? tests"},
		{set + `actor = NULL, reason = NULL`, "shadow ? ? logged ? ?"},
		{set + `enforcement = 'enforce', actor = E'\x01\x01eve', reason = E'\x01why'`, "enforce eve why logged eve why"}, // the trigger's own mark
		{set + `enforcement = 'shadow'`, "shadow ? ? logged ? ?"},
		{
			`INSERT INTO idempotency.policies (scope, name, actor, reason) VALUES ('prefix', 'order.', E'\x01eve', E'\x01why')`,
			"enforce eve why logged eve why",
		},
		{set + `enforcement = 'shadow' FROM (SELECT 'order.' AS name) AS one WHERE policies.name = one.name`, "shadow ? ? logged ? ?"},
		{`DELETE FROM idempotency.policies WHERE scope = 'prefix'; ` + set + `enforcement = 'shadow'`, "shadow ? ? logged ? ?"},
		{
			`INSERT INTO idempotency.policies (scope, actor, reason) VALUES ('all', 'ada', 'again') ON CONFLICT (scope, name)
				DO UPDATE SET enforcement = EXCLUDED.enforcement, actor = EXCLUDED.actor, reason = EXCLUDED.reason`,
			"enforce ada again logged ada again",
		},
	} {
		require.NoError(t, exec(step.sql), step.sql)
		require.Equal(t, step.want, blamed(), step.sql)
	}

	// The kill switch is not thrown in another's name.
	for _, who := range []string{``, `, actor = 'bob'`, `, reason = 'incident'`} {
		requireSQLState(t, "23514", exec(set+`enforcement = 'off'`+who))
	}
	require.NoError(t, exec(`BEGIN`))
	require.NoError(t, exec(`SELECT set_config('idempotency.actor', 'bob', true), set_config('idempotency.reason', 'incident 17', true)`))
	require.NoError(t, exec(set+`enforcement = 'off'`))
	require.NoError(t, exec(`COMMIT`))
	require.Equal(t, "off bob incident 17 logged bob incident 17", blamed())
	require.NoError(t, exec(set+`enforcement = 'shadow'`))
	require.Equal(t, "shadow ? ? logged ? ?", blamed(), "what was set for a transaction is over with it")
}
