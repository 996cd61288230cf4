package db_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestStatus_ToldOfEveryStage(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	pool := newPool(t, url)
	s, err := db.ReadStatus(t.Context(), pool)
	require.NoError(t, err)
	require.Zero(t, s.Version)
	require.Empty(t, s.Listed)
	require.True(t, s.Agrees())
	require.False(t, s.Pooled)

	require.NoError(t, db.Migrate(t.Context(), pool))
	s, err = db.ReadStatus(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, db.SchemaVersion, s.Version)
	require.True(t, s.Agrees(), "%v", s.Listed)

	_, err = pool.Exec(t.Context(), `DELETE FROM `+db.VersionTable+` WHERE version_id = 2`)
	require.NoError(t, err)
	s, err = db.ReadStatus(t.Context(), pool)
	require.NoError(t, err)
	require.False(t, s.Agrees())
}

func TestDown_UndoesWhatIsAskedForAndNothingElse(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.URL(t))
	for _, wrong := range []int{-1, db.SchemaVersion + 1} {
		require.ErrorContains(t, db.Down(t.Context(), pool, wrong), "the version must be from 0 to")
	}
	require.NoError(t, db.Down(t.Context(), pool, 3))
	s, err := db.ReadStatus(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, []int{1, 2, 3}, s.Listed)
	require.Equal(t, 3, s.Version)

	require.NoError(t, db.Down(t.Context(), pool, 3), "nothing to do")
	require.NoError(t, db.Migrate(t.Context(), pool))
	differences, err := db.Validate(t.Context(), pool)
	require.NoError(t, err)
	require.Empty(t, differences)

	through := newPool(t, pgtest.ThroughPooler(t, pool.Config().ConnString()))
	require.ErrorContains(t, db.Down(t.Context(), through, 1), "a pooler stands between")
	s, err = db.ReadStatus(t.Context(), through)
	require.NoError(t, err)
	require.True(t, s.Pooled)
	require.Equal(t, db.SchemaVersion, s.Version)
}

func TestValidate_NamesWhatSomebodyHasChanged(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.URL(t))
	differences, err := db.Validate(t.Context(), pool)
	require.NoError(t, err)
	require.Empty(t, differences)

	_, err = pool.Exec(t.Context(), `
		ALTER TABLE idempotency.records DISABLE TRIGGER records_check;
		ALTER TABLE idempotency.records DROP CONSTRAINT records_pkey;
		ALTER SEQUENCE idempotency.fence CACHE 20;
		DROP INDEX idempotency.records_stale_idx;
		ALTER TABLE idempotency.attempts ALTER actor TYPE varchar(10);
		CREATE OR REPLACE FUNCTION idempotency.lock_id(tenant text, operation text, key text) RETURNS bigint
			LANGUAGE sql IMMUTABLE AS 'SELECT 1::bigint';
		CREATE INDEX mine ON idempotency.records (client)`)
	require.NoError(t, err)
	differences, err = db.Validate(t.Context(), pool)
	require.NoError(t, err)
	var told []string
	for _, d := range differences {
		told = append(told, d.What)
		require.Equal(t, d.What == "index mine", d.Want == "", "%v", d)
		require.NotEmpty(t, d.String())
	}
	require.Subset(t, told, []string{
		"column attempts.actor", "constraint records_pkey", "function lock_id(tenant text, operation text, key text)", "index mine",
		"index records_pkey", "index records_stale_idx", "sequence fence", "trigger records_check",
	})
}
