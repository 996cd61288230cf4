package idempotencyclient

import (
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRetryAfter_SecondsAndDates(t *testing.T) {
	t.Parallel()
	const at = "Sun, 06 Nov 1994 08:49:37 GMT"
	for _, tt := range []struct {
		value, date string
		want        time.Duration
	}{
		{"", at, 0},
		{"0", at, 0},
		{" 120 ", at, 2 * time.Minute},
		{"-1", at, 0},
		{"1.5", at, 0},
		{"soon", at, 0},
		{"99999999999999999999", at, math.MaxInt64 / time.Second * time.Second},
		{"Sun, 06 Nov 1994 08:50:37 GMT", at, time.Minute},
		{"Sunday, 06-Nov-94 08:50:37 GMT", at, time.Minute}, // obsolete, and to be read
		{"Sun Nov  6 08:50:37 1994", at, time.Minute},
		{"Sun, 06 Nov 1994 08:49:36 GMT", at, 0},
		{"Sun, 06 Nov 1994 08:50:37 GMT", "", 0}, // long ago, by our clock
	} {
		h := http.Header{}
		h.Set("Retry-After", tt.value)
		h.Set("Date", tt.date)
		require.Equal(t, tt.want, retryAfter(h), tt)
	}
	soon := http.Header{"Retry-After": {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}}
	require.InDelta(t, time.Hour, retryAfter(soon), float64(time.Minute))
}
