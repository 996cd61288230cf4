// Package idempotencygin protects handlers of gin by the middleware of package idempotencyhttp.
package idempotencygin

import (
	"bufio"
	"net"
	"net/http"

	"github.com/gin-gonic/gin"
)

// Handler protects one handler, the last of its route. protect is of an idempotencyhttp.Middleware. The handler takes its
// transaction by txn.FromContext(c.Request.Context()).
//
// It is no middleware, because gin cannot run the rest of a chain a second time, and a transaction may need it. A handler that
// leaves an error (c.Error) and writes nothing is answered 500 and rolled back: whoever renders errors for it would come too late.
// Flush sends nothing, and Hijack is refused: let such routes be without this.
func Handler(protect func(http.Handler) http.Handler, handler gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		outer, request, errs := c.Writer, c.Request, len(c.Errors)
		defer func() { c.Writer, c.Request = outer, request }()
		protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.Request = r
			if w == http.ResponseWriter(outer) { // not protected
				handler(c)
				return
			}
			inner := &writer{ResponseWriter: w, status: http.StatusOK, size: -1}
			c.Writer, c.Errors = inner, c.Errors[:errs]
			handler(c)
			if len(c.Errors) > errs && !inner.Written() && inner.status < http.StatusBadRequest {
				inner.status = http.StatusInternalServerError
			}
			if inner.chosen || inner.status != http.StatusOK {
				inner.WriteHeaderNow()
			}
		})).ServeHTTP(outer, request)
	}
}

// writer is gin's view of a recorded response: WriteHeader chooses a status, and writing sends it.
type writer struct {
	http.ResponseWriter
	status int
	chosen bool
	size   int // -1: nothing was written
}

var _ gin.ResponseWriter = (*writer)(nil)

func (w *writer) WriteHeader(status int) {
	if status > 0 && !w.Written() {
		w.status, w.chosen = status, true
	}
}

func (w *writer) WriteHeaderNow() {
	if !w.Written() {
		w.size = 0
		w.ResponseWriter.WriteHeader(w.status)
	}
}

func (w *writer) Write(p []byte) (int, error) {
	w.WriteHeaderNow()
	n, err := w.ResponseWriter.Write(p)
	w.size += n
	return n, err
}

func (w *writer) WriteString(s string) (int, error) { return w.Write([]byte(s)) }

func (w *writer) Status() int   { return w.status }
func (w *writer) Size() int     { return w.size }
func (w *writer) Written() bool { return w.size >= 0 }

// Flush sends nothing: that is for after COMMIT.
func (w *writer) Flush() { w.WriteHeaderNow() }

func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, http.ErrNotSupported }
func (w *writer) Pusher() http.Pusher                          { return nil }

// CloseNotify is gin's, which net/http gave up for the request's context.
func (w *writer) CloseNotify() <-chan bool { return make(chan bool) }
