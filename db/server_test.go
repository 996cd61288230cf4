package db

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestServer_FitsNamesTheRuleThatIsBroken(t *testing.T) {
	t.Parallel()
	fine := server{encoding: "UTF8", version: 150018}
	require.NoError(t, fine.fits())

	old := fine
	old.version = 140020
	require.ErrorContains(t, old.fits(), "PostgreSQL 14, pgonce needs 15 or newer")

	latin := fine
	latin.encoding = "LATIN1"
	require.ErrorContains(t, latin.fits(), "encoding is LATIN1")

	standby := fine
	standby.inRecovery = true
	require.ErrorContains(t, standby.fits(), "a standby")
}
