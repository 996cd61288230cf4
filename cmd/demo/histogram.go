package main

import (
	"math"
	"time"
)

// histogram counts durations in buckets that grow by 2 % each, from 10 µs to some minutes: as exact as people read it,
// and of one size however long the storm is.
type histogram struct {
	buckets [900]int64
	count   int64
}

const (
	smallest = 10 * time.Microsecond
	growth   = 1.02
)

func (h *histogram) add(d time.Duration) {
	i := int(math.Log(float64(max(d, smallest))/float64(smallest)) / math.Log(growth))
	h.buckets[min(i, len(h.buckets)-1)]++
	h.count++
}

// quantile returns milliseconds, rounded to hundredths; 0 if nothing was added.
func (h *histogram) quantile(q float64) float64 {
	rank, seen := int64(math.Ceil(q*float64(h.count))), int64(0)
	for i, n := range h.buckets {
		if seen += n; n > 0 && seen >= rank {
			middle := float64(smallest) * math.Pow(growth, float64(i)+0.5)
			return math.Round(middle/float64(time.Millisecond)*100) / 100
		}
	}
	return 0
}
