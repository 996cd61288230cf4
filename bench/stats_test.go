package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	require.Zero(t, median(nil))
	require.InDelta(t, 2, median([]float64{3, 1, 2}), 0)
	require.InDelta(t, 2.5, median([]float64{4, 1, 3, 2}), 0)
}

func TestMedian_LeavesItsArgumentAlone(t *testing.T) {
	t.Parallel()
	values := []float64{3, 1, 2}
	median(values)
	require.Equal(t, []float64{3, 1, 2}, values)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	require.Zero(t, percentile(nil, 50))
	require.Equal(t, time.Duration(7), percentile([]time.Duration{7}, 99))
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	require.Equal(t, time.Duration(50), percentile(hundred, 50))
	require.Equal(t, time.Duration(99), percentile(hundred, 99))
	require.Equal(t, time.Duration(3), percentile([]time.Duration{1, 2, 3}, 99))
}

func TestRatioOf_DividesRoundByRound(t *testing.T) {
	t.Parallel()
	// The machine was half as fast in the second round: the ratio does not see it.
	require.Equal(t, ratio{Median: 2, Min: 2, Max: 2}, ratioOf([]float64{200, 100}, []float64{100, 50}))
	require.Equal(t, ratio{Median: 2, Min: 1, Max: 3}, ratioOf([]float64{1, 2, 3}, []float64{1, 1, 1}))
}

func TestRatioOf_WithoutABaseIsZero(t *testing.T) {
	t.Parallel()
	require.Zero(t, ratioOf([]float64{1}, nil))
	require.Zero(t, ratioOf([]float64{1}, []float64{0}))
}

func TestTargets_SayWhatTheyAreMissing(t *testing.T) {
	t.Parallel()
	r := &report{Cells: []cell{
		{Group: "fresh", Variant: "naive", Callers: 8, ToBase: map[string]ratio{"bare": {Median: 0.58}}},
		{Group: "fresh", Variant: "pgonce", Callers: 8, ToBase: map[string]ratio{"naive": {Median: 1.3}}},
		{Group: "replay", Variant: "replay-retry", Callers: 8, ToBase: map[string]ratio{"select": {Median: 0.8}}},
	}}
	got := targets(r)
	require.Len(t, got, 2)
	require.False(t, got[0].missed())
	require.Empty(t, got[0].Note)
	require.True(t, got[1].missed())
}

func TestTargets_AreNotComparableWhereNaiveIsOutOfItsRange(t *testing.T) {
	t.Parallel()
	r := &report{Cells: []cell{
		{Group: "fresh", Variant: "naive", Callers: 1, ToBase: map[string]ratio{"bare": {Median: 0.3}}},
		{Group: "fresh", Variant: "pgonce", Callers: 1, ToBase: map[string]ratio{"naive": {Median: 1}}},
	}}
	got := targets(r)
	require.Len(t, got, 1)
	require.NotEmpty(t, got[0].Note)
	require.False(t, got[0].missed())
}

func TestTargets_OfBigTables(t *testing.T) {
	t.Parallel()
	r := &report{
		Cells: []cell{
			{Group: "big-fresh", Variant: "fresh-100k", Callers: 1, ToBase: map[string]ratio{"fresh-100k": {Median: 1}}},
			{Group: "big-fresh", Variant: "fresh-big", Callers: 1, ToBase: map[string]ratio{"fresh-100k": {Median: 0.95}}},
			{Group: "big-retry", Variant: "retry-big", Callers: 1, ToBase: map[string]ratio{"retry-100k": {Median: 0.5}}},
			{Group: "big-retry-recent", Variant: "retry-big-recent", Callers: 1, ToBase: map[string]ratio{"retry-100k": {Median: 0.89}}},
		},
		Big: &bigResult{Questions: []answered{
			{Title: "11. Whose is it?", Guide: auditGuide, FirstMS: 2000, AgainMS: 400},
			{Title: "11. By an index", Guide: remedyGuide, FirstMS: 9000},
		}},
	}
	got := targets(r)
	require.Len(t, got, 4)
	require.False(t, got[0].missed())
	require.True(t, got[1].missed())
	require.True(t, got[2].missed())
	require.InDelta(t, 1.5, got[3].Got, 0)
	require.False(t, got[3].missed())

	r.Big.Questions[0].FirstMS = 3001
	require.True(t, targets(r)[3].missed())
	r.Big.Questions = r.Big.Questions[1:]
	require.True(t, targets(r)[3].missed(), "never asked")
}
