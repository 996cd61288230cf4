//go:build !race

package localfront_test

// keys go through the bounded fronts.
const keys = 1_000_000
