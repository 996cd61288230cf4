//go:build race

package localfront_test

// Ten times slower, and nothing here depends on the number.
const keys = 100_000
