package main

import (
	"context"
	"net/http"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
)

// headerAnsweredBy tells who gave a replay: for the storm's table, and for whoever is curious.
const headerAnsweredBy = "Pgonce-Answered-By"

// Who gives replays. Fronts go by their own names.
const (
	byLocal      = localfront.Name
	byRedis      = redisfront.Name
	byPostgreSQL = "postgresql"
	// A concurrent call of the same key in the same process, which this one waited for: memory of the instance, as the local
	// front is, and there in every strategy.
	byMerged = "merged"
)

type answeredKey struct{}

// withAnswered returns a context in which a call of the library leaves who gave its replay.
func withAnswered(ctx context.Context) (context.Context, *string) {
	by := new(string)
	return context.WithValue(ctx, answeredKey{}, by), by
}

// noteAnswered is the runner's OnEvent, which is told of a call's end in the call's goroutine.
func noteAnswered(ctx context.Context, e idempotency.Event) {
	replayed, is := e.(idempotency.Replayed)
	by, wanted := ctx.Value(answeredKey{}).(*string)
	switch {
	case !is || !wanted:
	case replayed.Shared:
		*by = byMerged
	case replayed.From != "":
		*by = replayed.From
	default:
		*by = byPostgreSQL
	}
}

// tellAnswered tells who gave a replay of the middleware inside.
func tellAnswered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, by := withAnswered(r.Context())
		next.ServeHTTP(&answeredWriter{w, by}, r.WithContext(ctx))
	})
}

type answeredWriter struct {
	http.ResponseWriter
	by *string
}

func (w *answeredWriter) WriteHeader(status int) {
	if *w.by != "" && w.Header().Get(idempotencyhttp.HeaderReplayed) == "true" { // else it could not be given
		w.Header().Set(headerAnsweredBy, *w.by)
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *answeredWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
