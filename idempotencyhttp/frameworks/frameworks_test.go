package frameworks_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/gofiber/fiber/v3"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencyfiber"
	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencygin"
	"github.com/pgonce/pgonce/txn"
)

func TestFrameworks_FirstAndReplayAreTheSameBytes(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("a\x00\xff\u2028<&>", 1000)
	do := func(ctx context.Context, customer, key, sent string) result {
		insert(ctx, key)
		return result{status: http.StatusCreated, body: customer + sent + body}
	}
	each(t, do, func(t *testing.T, s *site) {
		t.Helper()
		first, again := s.send(t, http.MethodPost, "k", "sent"), s.send(t, http.MethodPost, `"k"`, "sent")
		require.Equal(t, http.StatusCreated, first.status)
		require.Equal(t, "c-7sent"+body, first.body)
		require.False(t, first.replayed())
		require.True(t, again.replayed())
		require.Equal(t, first.status, again.status)
		require.Equal(t, first.body, again.body)
		for _, name := range []string{"Location", "Content-Type"} {
			require.NotEmpty(t, first.header.Get(name))
			require.Equal(t, first.header[name], again.header[name], name)
		}
		require.Contains(t, first.header.Get("Set-Cookie"), "secret")
		require.NotContains(t, again.header, "Set-Cookie")
		require.Equal(t, 1, s.orders(t, "k"))
		require.Equal(t, http.StatusUnprocessableEntity, s.send(t, http.MethodPost, "k", "other").status)
		require.Equal(t, http.StatusBadRequest, s.send(t, http.MethodPost, "", "sent").status)
		require.Equal(t, "application/problem+json", s.send(t, http.MethodPost, "", "sent").header.Get("Content-Type"))
	})
}

func TestFrameworks_ErrorsAreAnsweredBeforeTheTransactionEnds(t *testing.T) {
	t.Parallel()
	do := func(ctx context.Context, _, key, status string) result {
		insert(ctx, key)
		r := result{err: errors.New("refused")}
		_, _ = fmt.Sscan(status, &r.status)
		return r
	}
	each(t, do, func(t *testing.T, s *site) {
		t.Helper()
		for status, state := range map[int]string{http.StatusNotFound: "FAILED", http.StatusTooManyRequests: "", http.StatusInternalServerError: ""} {
			key := fmt.Sprint("k-", status)
			for i := range 2 {
				a := s.send(t, http.MethodPost, key, fmt.Sprint(status))
				require.Equal(t, status, a.status)
				require.Equal(t, state != "" && i > 0, a.replayed())
				s.requireState(t, key, state)
			}
			require.Zero(t, s.orders(t, key))
		}
	})
}

func TestFrameworks_AnotherRunStartsAnew(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	runs := map[string]int{}
	do := func(ctx context.Context, customer, key, sent string) result {
		mu.Lock()
		runs[sent]++
		n := runs[sent]
		mu.Unlock()
		insert(ctx, key)
		if n == 1 {
			tx, _ := txn.FromContext(ctx)
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40001'; END $$`)
			return result{status: http.StatusInternalServerError, err: err, link: "<first>"}
		}
		return result{status: http.StatusCreated, body: customer + sent}
	}
	each(t, do, func(t *testing.T, s *site) {
		t.Helper()
		a := s.send(t, http.MethodPost, "k", t.Name())
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.Equal(t, "c-7"+t.Name(), a.body)
		require.Empty(t, a.header.Get("Link"))
		require.Equal(t, 1, s.orders(t, "k"))
		require.Equal(t, a.body, s.send(t, http.MethodPost, "k", t.Name()).body)
	})
}

func TestFrameworks_PanicRollsBackAndGoesOn(t *testing.T) {
	t.Parallel()
	do := func(ctx context.Context, _, key, sent string) result {
		insert(ctx, key)
		panic("on purpose")
	}
	each(t, do, func(t *testing.T, s *site) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/customers/c-7/orders", nil)
		require.NoError(t, err)
		req.Header.Set(idempotencyhttp.HeaderKey, "k")
		resp, err := s.client.Do(req)
		if err == nil { // a recovering middleware outside
			require.Equal(t, http.StatusInternalServerError, resp.StatusCode)
			require.NoError(t, resp.Body.Close())
		}
		require.Zero(t, s.orders(t, "k"))
		s.requireState(t, "k", "")
	})
}

func TestFrameworks_SafeMethodsAndOptionalKeysPass(t *testing.T) {
	t.Parallel()
	do := func(ctx context.Context, customer, _, sent string) result {
		_, inside := txn.FromContext(ctx)
		return result{status: http.StatusAccepted, body: fmt.Sprint(customer, sent, inside)}
	}
	each(t, do, func(t *testing.T, s *site) {
		t.Helper()
		for method, key := range map[string]string{http.MethodGet: "k", http.MethodPost: ""} {
			a := s.send(t, method, key, "sent")
			require.Equal(t, http.StatusAccepted, a.status)
			require.Equal(t, "c-7sentfalse", a.body)
			require.Equal(t, "/here", a.header.Get("Location"))
		}
	}, func(c *idempotencyhttp.Config) { c.Optional = true })
}

// What each framework can do past a record.
func TestFrameworks_WaysPastTheRecordAreRefused(t *testing.T) {
	t.Parallel()
	do := func(ctx context.Context, _, key, _ string) result {
		insert(ctx, key)
		return result{}
	}
	for name, start := range map[string]func(*testing.T, net.Listener, protect, work){
		"gin, an error and nothing written": func(t *testing.T, l net.Listener, once protect, do work) {
			t.Helper()
			ginHandler(t, l, once, func(c *gin.Context) {
				do(c.Request.Context(), "", c.GetHeader(idempotencyhttp.HeaderKey), "")
				_ = c.Error(errors.New("somebody else will answer"))
			})
		},
		"gin, hijack": func(t *testing.T, l net.Listener, once protect, do work) {
			t.Helper()
			ginHandler(t, l, once, func(c *gin.Context) {
				do(c.Request.Context(), "", c.GetHeader(idempotencyhttp.HeaderKey), "")
				_, _, err := c.Writer.Hijack()
				_ = c.AbortWithError(http.StatusInternalServerError, err)
			})
		},
		"fiber, hijack": func(t *testing.T, l net.Listener, once protect, do work) {
			t.Helper()
			app := fiber.New()
			app.Use(func(c fiber.Ctx) error {
				err := c.Next()
				c.Set("X-Hijacked", fmt.Sprint(c.RequestCtx().Hijacked()))
				return err
			})
			app.Post("/customers/:customer/orders", idempotencyfiber.Handler(once, func(c fiber.Ctx) error {
				do(c.Context(), "", c.Get(idempotencyhttp.HeaderKey), "")
				c.RequestCtx().Hijack(func(net.Conn) {})
				return nil
			}))
			serveFiber(t, l, app)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one(t, start, do, func(t *testing.T, s *site) {
				t.Helper()
				a := s.send(t, http.MethodPost, "k", "")
				require.Equal(t, http.StatusInternalServerError, a.status)
				require.NotEqual(t, "true", a.header.Get("X-Hijacked"))
				require.Zero(t, s.orders(t, "k"))
				s.requireState(t, "k", "")
			})
		})
	}
}

func TestGin_AStatusAloneIsAnAnswer(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		ginHandler(t, l, once, func(c *gin.Context) {
			do(c.Request.Context(), "", c.GetHeader(idempotencyhttp.HeaderKey), "")
			c.Status(http.StatusAccepted)
		})
	}
	one(t, start, func(ctx context.Context, _, key, _ string) result {
		insert(ctx, key)
		return result{}
	}, func(t *testing.T, s *site) {
		t.Helper()
		require.Equal(t, http.StatusAccepted, s.send(t, http.MethodPost, "k", "").status)
		again := s.send(t, http.MethodPost, "k", "")
		require.Equal(t, http.StatusAccepted, again.status)
		require.True(t, again.replayed())
	})
}

func ginHandler(t *testing.T, l net.Listener, once protect, h gin.HandlerFunc) {
	t.Helper()
	e := gin.New()
	e.POST("/customers/:customer/orders", idempotencygin.Handler(once, h))
	serve(t, l, e)
}

// Why echo has a middleware of its own here.
func TestEcho_WrapMiddlewareTakesAnErrorForASuccess(t *testing.T) {
	t.Parallel()
	do := func(ctx context.Context, _, key, _ string) result {
		insert(ctx, key)
		return result{}
	}
	start := func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		e := echo.New()
		e.POST("/customers/:customer/orders", func(c echo.Context) error {
			do(c.Request().Context(), "", c.Request().Header.Get(idempotencyhttp.HeaderKey), "")
			_, _ = io.Copy(io.Discard, c.Request().Body)
			return echo.ErrNotFound
		}, echo.WrapMiddleware(once))
		serve(t, l, e)
	}
	one(t, start, do, func(t *testing.T, s *site) {
		t.Helper()
		require.Equal(t, http.StatusOK, s.send(t, http.MethodPost, "k", "").status)
		s.requireState(t, "k", "SUCCESS")
	})
}
