package main

import (
	"io"
	"os"
	"sync"
)

// screen is where people look: lines, and on a terminal a bar below them. It may be written to concurrently.
type screen struct {
	terminal bool

	mu  sync.Mutex
	out io.Writer
	bar bool // is what was drawn last
}

func newScreen(out io.Writer) *screen { return &screen{terminal: isTerminal(out), out: out} }

// isTerminal reports whether a bar can be drawn there.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Write writes whole lines, in place of the bar, which is drawn again below them.
func (s *screen) Write(lines []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bar {
		s.bar = false
		_, _ = io.WriteString(s.out, "\r\x1b[K")
	}
	return s.out.Write(lines)
}

// draw draws the bar, over the one before.
func (s *screen) draw(bar string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bar = true
	_, _ = io.WriteString(s.out, "\r"+bar)
}

// keep leaves the bar where it is and goes on below it.
func (s *screen) keep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bar {
		s.bar = false
		_, _ = io.WriteString(s.out, "\n")
	}
}
