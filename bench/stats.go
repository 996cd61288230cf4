package main

import (
	"slices"
	"time"
)

// median of the values, 0 of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// percentile returns the smallest value that at least p percent of the sorted values do not exceed.
func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// ratio is a median over rounds, with the smallest and the largest round.
type ratio struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// ratioOf divides round by round, since only what ran side by side can be compared.
func ratioOf(values, base []float64) ratio {
	quotients := make([]float64, 0, len(values))
	for i := range min(len(values), len(base)) {
		if base[i] > 0 {
			quotients = append(quotients, values[i]/base[i])
		}
	}
	if len(quotients) == 0 {
		return ratio{}
	}
	return ratio{Median: median(quotients), Min: slices.Min(quotients), Max: slices.Max(quotients)}
}
