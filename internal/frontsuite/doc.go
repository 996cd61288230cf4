// Package frontsuite examines the fronts together with txn: the same answers with and without them, whatever happens to
// Redis meanwhile.
package frontsuite
