// Package idempotencymsg handles the messages of an at-least-once broker once each: what the handler writes and the mark
// that the message was handled are one transaction. A message that is delivered again is acknowledged without running.
package idempotencymsg
