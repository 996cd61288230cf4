//go:build failpoints

package failpoint

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestArm_SpringsOnce(t *testing.T) {
	require.True(t, Enabled)
	t.Cleanup(func() { require.NoError(t, Arm()) })
	require.NoError(t, Arm(
		Trap{At: CommitSent, Do: Panic, Hit: 2}, Trap{At: CommitAfter, Do: Sleep, For: 30 * time.Millisecond}))
	Hit(CommitSent)
	require.PanicsWithValue(t, "failpoint: commit.sent=panic@2", func() { Hit(CommitSent) })
	Hit(CommitSent)

	start := time.Now()
	Hit(CommitAfter)
	require.GreaterOrEqual(t, time.Since(start), 30*time.Millisecond)
	require.Equal(t, map[Point]int{CommitSent: 3, CommitAfter: 1}, Hits())

	require.NoError(t, Arm())
	Hit(CommitSent)
	Hit(CommitSent)
	require.Equal(t, map[Point]int{CommitSent: 2}, Hits())
}

func TestArm_RefusesNonsense(t *testing.T) {
	require.ErrorContains(t, Arm(Trap{At: "nowhere", Do: Kill}), "there is no point")
	require.Panics(t, func() { Hit("nowhere") })
}

func TestHit_OneOfManyGoroutinesSpringsTheTrap(t *testing.T) {
	t.Cleanup(func() { require.NoError(t, Arm()) })
	require.NoError(t, Arm(Trap{At: FunctionBefore, Do: Panic, Hit: 50}))
	var all sync.WaitGroup
	panics := make(chan any, 100)
	for range 100 {
		all.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					panics <- p
				}
			}()
			Hit(FunctionBefore)
		})
	}
	all.Wait()
	require.Len(t, panics, 1)
	require.Equal(t, 100, Hits()[FunctionBefore])
}
