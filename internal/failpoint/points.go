// Package failpoint ends, stops or delays the process at a named place of the code, so that a test can see what a crash
// there leaves behind.
//
// In a normal build Hit does nothing and costs nothing. Built with the tag failpoints, it counts, and springs the traps
// that are set: by Arm in this process, or by the environment variable PGONCE_FAILPOINTS in a child process.
package failpoint

import "slices"

// Point is a place in the code.
type Point string

// The points, in the order in which a call passes them. A new one is entered in All too.
const (
	AcquireBefore  Point = "acquire.before"  // no connection yet
	AcquireAfter   Point = "acquire.after"   // the key's lock is ours, nothing is written
	FunctionBefore Point = "function.before" // the next thing is the service's function
	FunctionAfter  Point = "function.after"  // business rows are written, not committed
	CompleteBefore Point = "complete.before" // the record is about to be sent, with COMMIT
	CommitSent     Point = "commit.sent"     // record and COMMIT are sent, nothing is read
	CommitAfter    Point = "commit.after"    // committed, the caller does not know yet
	RollbackBefore Point = "rollback.before" // something failed, the transaction is open
	FinalBefore    Point = "final.before"    // rolled back, the failure is not recorded
	FinalComplete  Point = "final.complete"  // the failure's own transaction is open
	ResolveBefore  Point = "resolve.before"  // a COMMIT was lost, nobody has looked
	ResolveAfter   Point = "resolve.after"   // the lost COMMIT is known to have committed
	JoinedComplete Point = "joined.complete" // the record is in the caller's transaction, who has not committed
	JoinedPublish  Point = "joined.publish"  // the caller has committed, nobody has looked
)

// All returns every point.
func All() []Point {
	return slices.Clone(all)
}

var all = []Point{
	AcquireBefore, AcquireAfter, FunctionBefore, FunctionAfter, CompleteBefore, CommitSent, CommitAfter, RollbackBefore,
	FinalBefore, FinalComplete, ResolveBefore, ResolveAfter, JoinedComplete, JoinedPublish,
}
