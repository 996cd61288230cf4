package main

import (
	_ "embed"
	"net/http"
)

// openAPI describes the service, and what every service behind the middleware has in common. What it says is compared with what
// the service does in ./edgetest.
//
//go:embed openapi.yaml
var openAPI []byte

func getOpenAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(openAPI) // an error: the client has gone
}
