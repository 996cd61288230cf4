package ids_test

import (
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/ids"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 123_456_789, time.UTC)

func TestOrderID_IsAChecksumOfItsParts(t *testing.T) {
	t.Parallel()
	id := ids.OrderID("c-7", "sku-9", noon)
	// Computed once by another program: what is printed on receipts must not change with a release.
	require.Equal(t, "SQRS5Z29F8QST", id)
	require.Regexp(t, regexp.MustCompile(`^[0-9A-HJKMNP-TV-Z]{13}$`), id)
	require.True(t, ids.Verify(id, "c-7", "sku-9", noon))
	require.True(t, ids.Verify(id, "c-7", "sku-9", noon.Truncate(time.Millisecond).In(time.FixedZone("", 3600))), "the same millisecond")

	for name, ok := range map[string]bool{
		"another customer":    ids.Verify(id, "c-8", "sku-9", noon),
		"another sku":         ids.Verify(id, "c-7", "sku-8", noon),
		"another millisecond": ids.Verify(id, "c-7", "sku-9", noon.Add(time.Millisecond)),
		"parts moved":         ids.Verify(id, "c-7s", "ku-9", noon),
		"parts exchanged":     ids.Verify(id, "sku-9", "c-7", noon),
		"cut":                 ids.Verify(id[:12], "c-7", "sku-9", noon),
		"longer":              ids.Verify(id+"0", "c-7", "sku-9", noon),
		"empty":               ids.Verify("", "", "", noon),
	} {
		require.False(t, ok, name)
	}
}
