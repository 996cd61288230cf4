package idempotencyclient_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

// The table is compared with the main module's constants there; it cannot import these.
func TestDefaults_TableIsTheCode(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/defaults.md")
	require.NoError(t, err)
	for _, row := range []string{
		fmt.Sprintf("| HTTP client, attempts | %d |", idempotencyclient.DefaultAttempts),
		fmt.Sprintf("| HTTP client, first pause | %d ms |", idempotencyclient.DefaultPause/time.Millisecond),
		fmt.Sprintf("| HTTP client, longest pause | %d s |", idempotencyclient.DefaultMaxPause/time.Second),
		fmt.Sprintf("| HTTP client, an attempt | %d s |", idempotencyclient.DefaultAttemptTime/time.Second),
		fmt.Sprintf("| HTTP client, all of it | %d s |", idempotencyclient.DefaultMaxTime/time.Second),
		fmt.Sprintf("| HTTP client, answer read ahead | %d MiB |", idempotencyclient.DefaultMaxAnswer>>20),
	} {
		require.Contains(t, string(text), row)
	}
}
