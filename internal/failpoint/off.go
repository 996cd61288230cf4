//go:build !failpoints

package failpoint

// Enabled reports whether this build has failpoints.
const Enabled = false

// Hit says that the code has come to a point.
func Hit(Point) {}

// Arm returns ErrNotBuilt.
func Arm(...Trap) error { return ErrNotBuilt }

// Hits returns nil.
func Hits() map[Point]int { return nil }
