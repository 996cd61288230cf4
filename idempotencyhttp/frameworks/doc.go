// Package frameworks holds what routers need that do not speak net/http to the end, in a module of its own: a program that
// uses one of them, or none, inherits nothing of the others. Its tests hold all of them to the same bytes.
package frameworks
