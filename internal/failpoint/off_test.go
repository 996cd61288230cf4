//go:build !failpoints

package failpoint

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestArm_NeedsTheTag(t *testing.T) {
	t.Parallel()
	require.False(t, Enabled)
	require.ErrorIs(t, Arm(Trap{At: CommitSent, Do: Kill}), ErrNotBuilt)
	Hit(CommitSent)
	Hit("anything")
	require.Empty(t, Hits())
}
