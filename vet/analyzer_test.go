package vet_test

import (
	"testing"

	"golang.org/x/tools/go/analysis/analysistest"

	"github.com/pgonce/pgonce/vet"
)

// The packages in testdata say themselves what is to be found in them, and what is not.
func TestAnalyzer(t *testing.T) {
	t.Parallel()
	analysistest.Run(t, analysistest.TestData(), vet.Analyzer, "store", "orders", "edges", "accepted", "quiet", "services", "odd")
}
