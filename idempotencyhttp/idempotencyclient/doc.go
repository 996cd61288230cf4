// Package idempotencyclient makes HTTP clients keep one Idempotency-Key over all tries of a request, and try again where that
// helps: when no answer came, and when the service says that it is not finished or could not work.
//
// It is an http.RoundTripper. A request that is not safe (POST, PUT, PATCH, DELETE) gets a fresh key, or the one that it brings
// in its header or its context, and is sent again, with the same key and the same bytes, after a broken connection, an answer that
// breaks off, 429, and the problems whose page says "retry with the same key": in-progress, outcome-unknown, unavailable,
// internal. Retry-After is obeyed. Every other answer is final and handed on, a replayed one always.
//
// A key protects only where the service knows the header: do not give this transport to others, since what is sent twice there is
// done twice. Config.Protected tells them apart.
//
// It needs net/http and two small libraries: no part of the server, and no database.
package idempotencyclient
