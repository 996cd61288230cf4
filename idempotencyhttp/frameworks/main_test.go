package frameworks_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/gofiber/fiber/v3"
	fiberrecover "github.com/gofiber/fiber/v3/middleware/recover"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"
	echomiddleware "github.com/labstack/echo/v4/middleware"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencyecho"
	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencyfiber"
	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencygin"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) {
	gin.SetMode(gin.ReleaseMode)
	// fiber's server leaves these behind, asleep.
	pgtest.Main(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
	)
}

var create = idempotency.Operation{Name: "order.create"}

// result is what the handler of the tests comes to: in each framework's own way of answering.
type result struct {
	status int
	err    error // the framework's error handler answers
	body   string
	link   string // a header that is set first
}

// work is the handler, without its framework. key is the request's, body what it sent.
type work func(ctx context.Context, customer, key, body string) result

type protect = func(http.Handler) http.Handler

// frameworks serve POST and GET /customers/{customer}/orders, protected, until the test ends.
var frameworks = map[string]func(t *testing.T, l net.Listener, once protect, do work){
	"net/http": func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		mux := http.NewServeMux()
		mux.Handle("/customers/{customer}/orders", once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			write(w, r, r.PathValue("customer"), do)
		})))
		serve(t, l, mux)
	},
	"chi": func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		sub := chi.NewRouter()
		sub.With(once).Post("/orders", func(w http.ResponseWriter, r *http.Request) { write(w, r, chi.URLParam(r, "customer"), do) })
		sub.With(once).Get("/orders", func(w http.ResponseWriter, r *http.Request) { write(w, r, chi.URLParam(r, "customer"), do) })
		r := chi.NewRouter()
		r.Mount("/customers/{customer}", sub)
		serve(t, l, r)
	},
	"echo": func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		e := echo.New()
		e.Use(echomiddleware.RecoverWithConfig(echomiddleware.RecoverConfig{LogErrorFunc: func(_ echo.Context, err error, _ []byte) error { return err }}))
		handler := func(c echo.Context) error {
			body, _ := io.ReadAll(c.Request().Body)
			r := do(c.Request().Context(), c.Param("customer"), c.Request().Header.Get(idempotencyhttp.HeaderKey), string(body))
			c.Response().Header().Set("Link", r.link)
			if r.err != nil {
				return echo.NewHTTPError(r.status, r.err.Error())
			}
			c.Response().Header().Set("Location", "/here")
			c.SetCookie(&http.Cookie{Name: "secret", Value: "s"})
			return c.Blob(r.status, "text/x", []byte(r.body))
		}
		e.POST("/customers/:customer/orders", handler, idempotencyecho.Middleware(once))
		e.GET("/customers/:customer/orders", handler, idempotencyecho.Middleware(once))
		serve(t, l, e)
	},
	"gin": func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		e := gin.New()
		e.Use(gin.CustomRecoveryWithWriter(io.Discard, func(c *gin.Context, _ any) { c.AbortWithStatus(http.StatusInternalServerError) }))
		handler := idempotencygin.Handler(once, func(c *gin.Context) {
			body, _ := c.GetRawData()
			r := do(c.Request.Context(), c.Param("customer"), c.GetHeader(idempotencyhttp.HeaderKey), string(body))
			c.Header("Link", r.link)
			if r.err != nil {
				_ = c.AbortWithError(r.status, r.err)
				return
			}
			c.Header("Location", "/here")
			c.SetCookie("secret", "s", 0, "/", "", false, false)
			c.Data(r.status, "text/x", []byte(r.body))
		})
		e.POST("/customers/:customer/orders", handler)
		e.GET("/customers/:customer/orders", handler)
		serve(t, l, e)
	},
	"fiber": func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		app := fiber.New()
		app.Use(fiberrecover.New())
		handler := idempotencyfiber.Handler(once, func(c fiber.Ctx) error {
			r := do(c.Context(), c.Params("customer"), c.Get(idempotencyhttp.HeaderKey), string(c.Body()))
			if r.link != "" {
				c.Set("Link", r.link)
			}
			if r.err != nil {
				return fiber.NewError(r.status, r.err.Error())
			}
			c.Set("Location", "/here")
			c.Cookie(&fiber.Cookie{Name: "secret", Value: "s"})
			c.Set("Content-Type", "text/x")
			return c.Status(r.status).SendString(r.body)
		})
		app.Post("/customers/:customer/orders", handler)
		app.Get("/customers/:customer/orders", handler)
		serveFiber(t, l, app)
	},
}

func serveFiber(t *testing.T, l net.Listener, app *fiber.App) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = app.Listener(l, fiber.ListenConfig{DisableStartupMessage: true})
	}()
	t.Cleanup(func() {
		_ = app.Shutdown()
		<-ended
	})
}

func write(w http.ResponseWriter, r *http.Request, customer string, do work) {
	body, _ := io.ReadAll(r.Body)
	res := do(r.Context(), customer, r.Header.Get(idempotencyhttp.HeaderKey), string(body))
	w.Header().Set("Link", res.link)
	if res.err != nil {
		http.Error(w, res.err.Error(), res.status)
		return
	}
	w.Header().Set("Location", "/here")
	w.Header().Set("Content-Type", "text/x")
	http.SetCookie(w, &http.Cookie{Name: "secret", Value: "s"})
	w.WriteHeader(res.status)
	_, _ = io.WriteString(w, res.body)
}

func serve(t *testing.T, l net.Listener, h http.Handler) {
	t.Helper()
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(l)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-ended
	})
}

// site is a database, and a server of one framework on it.
type site struct {
	pool   *pgxpool.Pool
	client *http.Client
	url    string
}

// each runs a test under every framework.
func each(t *testing.T, do work, test func(t *testing.T, s *site), cfg ...func(*idempotencyhttp.Config)) {
	t.Helper()
	for name, start := range frameworks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one(t, start, do, test, cfg...)
		})
	}
}

func one(t *testing.T, start func(*testing.T, net.Listener, protect, work), do work, test func(t *testing.T, s *site), cfg ...func(*idempotencyhttp.Config)) {
	t.Helper()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) { txn.ConfigurePool(c) })
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`)
	require.NoError(t, err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	config := &idempotencyhttp.Config{Log: slog.New(slog.DiscardHandler)}
	for _, change := range cfg {
		change(config)
	}
	once, err := idempotencyhttp.New(runner, idempotencyhttp.SingleTenant, config)
	require.NoError(t, err)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &site{pool: pool, client: &http.Client{Transport: &http.Transport{}}, url: "http://" + listener.Addr().String()}
	start(t, listener, once.Operation(create.Name), do)
	t.Cleanup(s.client.CloseIdleConnections)
	test(t, s)
}

type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) replayed() bool { return a.header.Get(idempotencyhttp.HeaderReplayed) == "true" }

func (s *site) send(t *testing.T, method, key, body string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+"/customers/c-7/orders", strings.NewReader(body))
	require.NoError(t, err)
	if key != "" {
		req.Header.Set(idempotencyhttp.HeaderKey, key)
	}
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return answer{resp.StatusCode, resp.Header, string(text)}
}

func (s *site) orders(t *testing.T, key string) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM orders WHERE key = $1`, key).Scan(&n))
	return n
}

func (s *site) requireState(t *testing.T, key, want string) {
	t.Helper()
	var state string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT coalesce((SELECT max(state) FROM idempotency.records WHERE key = $1), '')`, key).Scan(&state))
	require.Equal(t, want, state)
}

// insert writes an order in the transaction of the context.
func insert(ctx context.Context, key string) {
	tx, ok := txn.FromContext(ctx)
	if !ok {
		panic("no transaction")
	}
	if _, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ($1)`, key); err != nil {
		panic(fmt.Sprint("insert: ", err))
	}
}
