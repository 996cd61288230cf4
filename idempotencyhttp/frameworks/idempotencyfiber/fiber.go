// Package idempotencyfiber protects handlers of fiber by the middleware of package idempotencyhttp.
package idempotencyfiber

import (
	"errors"
	"net/http"

	"github.com/gofiber/fiber/v3"
	"github.com/gofiber/fiber/v3/middleware/adaptor"
	"github.com/valyala/fasthttp"
)

// Handler protects one handler, the last of its route. protect is of an idempotencyhttp.Middleware. The handler takes its
// transaction by txn.FromContext(c.Context()). An error that it returns is answered by fiber's error handler before the
// transaction ends. Hijacking is refused, and a body that is a stream is read to its end first.
//
// It is no middleware, because fiber cannot run the rest of a chain a second time, and a transaction may need it. Nor is it
// fiber's own adaptor for middleware, which runs the handler after the middleware has returned.
func Handler(protect func(http.Handler) http.Handler, handler fiber.Handler) fiber.Handler {
	return func(c fiber.Ctx) (err error) {
		request, err := adaptor.ConvertRequest(c, true)
		if err != nil {
			return fiber.NewError(fiber.StatusBadRequest, err.Error())
		}
		// What fiber has of the request is used again when its handler has returned, and so is our response until then.
		before := fasthttp.AcquireResponse()
		defer fasthttp.ReleaseResponse(before)
		c.Response().CopyTo(before)
		outer := &writer{ctx: c, header: headersOf(before)}
		ctx, done := c.Context(), false
		defer func() {
			c.SetContext(ctx)
			if !done { // a panic: what was half written is nobody's answer
				before.CopyTo(c.Response())
			}
		}()
		protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.SetContext(r.Context())
			if w == http.ResponseWriter(outer) { // not protected
				outer.passed = true
				err = handler(c)
				return
			}
			before.CopyTo(c.Response())
			answer(c, handler)
			copyTo(w, c.Response())
		})).ServeHTTP(outer, request.WithContext(ctx))
		outer.end()
		done = true
		return err
	}
}

// answer runs the handler to a response.
func answer(c fiber.Ctx, handler fiber.Handler) {
	err := handler(c)
	if c.RequestCtx().Hijacked() {
		c.RequestCtx().Hijack(nil)
		err = errors.New("idempotencyfiber: a protected route cannot be hijacked")
	}
	if err == nil {
		return
	}
	if err := c.App().ErrorHandler(c, err); err != nil {
		c.Response().Reset()
		c.Response().SetStatusCode(fiber.StatusInternalServerError)
	}
}

func copyTo(w http.ResponseWriter, response *fasthttp.Response) {
	h := w.Header()
	clear(h)
	for name, values := range headersOf(response) {
		h[name] = values
	}
	body := response.Body()
	w.WriteHeader(response.StatusCode())
	_, _ = w.Write(body) // over the limit: the recorder knows
}

func headersOf(response *fasthttp.Response) http.Header {
	h := http.Header{}
	for name, value := range response.Header.All() {
		h.Add(string(name), string(value))
	}
	h.Del("Content-Length") // of the body that is there now, and fasthttp's to say
	return h
}

// writer is where the middleware sends its answer to.
type writer struct {
	ctx    fiber.Ctx
	header http.Header
	status int
	body   []byte
	passed bool
}

func (w *writer) Header() http.Header { return w.header }

func (w *writer) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
}

func (w *writer) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	w.body = append(w.body, p...)
	return len(p), nil
}

// end makes the answer fiber's response.
func (w *writer) end() {
	if w.passed {
		return
	}
	response := w.ctx.Response()
	response.Reset()
	w.WriteHeader(http.StatusOK)
	response.SetStatusCode(w.status)
	for name, values := range w.header {
		for _, value := range values {
			response.Header.Add(name, value)
		}
	}
	response.SetBodyRaw(w.body)
}
