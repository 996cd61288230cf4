// Package edgetest runs clients against the demo as they would be run: curl with the commands of docs/http.md, the Go client, a program
// in Node.js, and a page of another origin in a browser. Everything the demo answers them is compared with its OpenAPI document.
//
// The demo's program is built by the tests, of which go test's cache knows nothing: after a change elsewhere use -count=1.
package edgetest
