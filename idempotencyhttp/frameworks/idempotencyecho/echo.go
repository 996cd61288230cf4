// Package idempotencyecho protects routes of echo by the middleware of package idempotencyhttp.
package idempotencyecho

import (
	"net/http"

	"github.com/labstack/echo/v4"
)

// Middleware is protect, which is of an idempotencyhttp.Middleware, for echo. The handler takes its transaction by
// txn.FromContext(c.Request().Context()).
//
// It is not echo.WrapMiddleware: there an error that a handler returns is answered behind the middleware's back, which sees
// nothing written, takes it for a 200, and commits. Here echo's error handler answers before the transaction ends.
func Middleware(protect func(http.Handler) http.Handler) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) (err error) {
			request, outer := c.Request(), c.Response()
			defer func() {
				c.SetRequest(request)
				c.SetResponse(outer)
			}()
			protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.SetRequest(r)
				if w == http.ResponseWriter(outer) { // not protected
					err = next(c)
					return
				}
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				if err := next(c); err != nil {
					c.Error(err)
				}
			})).ServeHTTP(outer, request)
			return err
		}
	}
}
