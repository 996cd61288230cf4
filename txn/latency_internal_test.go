package txn

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLatency_MarkLivesForTheTimeOfARequest(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		380 * time.Millisecond: 1070 * time.Millisecond,
		160 * time.Millisecond: 740 * time.Millisecond,
		0:                      501 * time.Millisecond, // a millisecond is the least it counts, and half of one is lost
		time.Hour:              maxMarkLife,
	} {
		var l latency
		require.Equal(t, firstMarkLife, l.markLife(), "nothing is known yet")
		for range 100 {
			l.add(took)
		}
		l.computed = stopwatch{}
		l.add(took)
		require.InDelta(t, want, l.markLife(), float64(time.Millisecond), took)
	}
}

func TestLatency_OneSlowRequestInAThousandIsNoRule(t *testing.T) {
	t.Parallel()
	var l latency
	l.add(30 * time.Second)
	for range 999 {
		l.add(10 * time.Millisecond)
	}
	l.computed = stopwatch{}
	l.add(10 * time.Millisecond)
	require.InDelta(t, 515*time.Millisecond, l.markLife(), float64(time.Millisecond))
}
