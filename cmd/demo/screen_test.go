package main

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScreen_LinesTakeTheBarsPlace(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := newScreen(&out)
	require.False(t, s.terminal)
	s.keep()
	s.draw("[#.]")
	_, _ = fmt.Fprintln(s, "Redis was killed.")
	_, _ = fmt.Fprintln(s, "Another line.")
	s.draw("[##]")
	s.keep()
	_, _ = fmt.Fprintln(s, "The end.")
	require.Equal(t, "\r[#.]\r\x1b[KRedis was killed.\nAnother line.\n\r[##]\nThe end.\n", out.String())
}
