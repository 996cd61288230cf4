package edgetest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// pageServer serves the page, and tells its origin.
func pageServer(t *testing.T, done <-chan struct{}) string {
	t.Helper()
	files := http.FileServer(http.Dir("testdata"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/done" {
			select {
			case <-done:
			case <-r.Context().Done():
			}
			return
		}
		files.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// browse opens the page for a service, in a browser of its own.
func browse(t *testing.T, origin, service string) context.Context {
	t.Helper()
	options := slices.Concat(chromedp.DefaultExecAllocatorOptions[:], []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(pgtest.Program(t, "chromium")), chromedp.UserDataDir(t.TempDir()),
		chromedp.NoSandbox, // it needs a user who is not root
		chromedp.DisableGPU, chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-dev-shm-usage", true), // which is small in containers
		chromedp.WSURLReadTimeout(2 * time.Minute),   // its start, on a busy machine
	})
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	tab, closeTab := chromedp.NewContext(allocator)
	t.Cleanup(closeTab)
	require.NoError(t, chromedp.Do(tab)) // the browser lives as long as this context
	bounded, cancel := context.WithTimeout(tab, 2*time.Minute)
	defer cancel()
	require.NoError(t, chromedp.Do(bounded, chromedp.Navigate(origin+"/page.html?shop="+url.QueryEscape(service))))
	_, err := chromedp.Run(bounded, chromedp.Poll[bool](`document.title === "ready"`))
	require.NoError(t, err)
	return tab
}

// call calls a function of the page and awaits what it promises.
func call[T any](ctx context.Context, tab context.Context, function string, args ...any) (got T, err error) {
	list, err := json.Marshal(args)
	if err != nil {
		return got, err
	}
	bounded, cancel := context.WithTimeout(tab, 2*time.Minute)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	return chromedp.Run(bounded, chromedp.Evaluate[T](fmt.Sprintf("%s(...%s)", function, list), chromedp.EvalAwaitPromise))
}

// A page of another origin loses the answer, tries again with the same key, and shows its order and that it is a replay.
func TestCase_H10_APageOfAnotherOriginSeesTheDocumentedAnswers(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	origin := pageServer(t, left)
	p := newProxy(t, startDemo(t, "-allow-origin", origin))
	tab := browse(t, origin, p.url)
	examineAt(t, p, half, func(ctx context.Context, to string, a asked) (answer, error) {
		path, err := url.Parse(to)
		if err != nil {
			return answer{}, err
		}
		return call[answer](ctx, tab, "order", "key "+a.Key, path.Path, a)
	})

	// Its reader leaves when the order is made and the answer is on its way, and comes back.
	arrived := p.lose("left", hold)
	go func() {
		<-arrived
		close(left)
	}()
	one := asked{Key: "left", Body: coffee}
	name, err := call[string](t.Context(), tab, "orderAndLeave", "leaves", "/orders", one, "/done")
	require.NoError(t, err)
	require.Equal(t, "AbortError", name)
	back, err := call[answer](t.Context(), tab, "order", "comes back", "/orders", one)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, back.Status, back.Text)
	require.True(t, back.Replayed)
	require.Equal(t, 1, p.demo.orders(t, "left"))

	bounded, cancel := context.WithTimeout(tab, 2*time.Minute)
	defer cancel()
	shown, err := chromedp.Run(bounded, chromedp.Text(chromedp.CSS("#answers")))
	require.NoError(t, err)
	require.Contains(t, shown, "AbortError")
	require.Contains(t, shown, back.Text[:len(back.Text)-1])
	if file := os.Getenv("PGONCE_SCREENSHOT"); file != "" { // for whoever wants to look
		picture, err := chromedp.Run(bounded, chromedp.FullScreenshot(100))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, picture, 0o600))
	}
}

// What docs/http.md says of CORS is needed: without it the browser sends nothing.
func TestCase_H10_AStrangersPageIsRefused(t *testing.T) {
	t.Parallel()
	origin := pageServer(t, nil)
	p := newProxy(t, startDemo(t, "-strict", "-allow-origin", "http://localhost:3000"))
	tab := browse(t, origin, p.url)
	_, err := call[answer](t.Context(), tab, "order", "stranger", "/orders", asked{Key: "k", Body: coffee, Attempts: 1})
	require.ErrorContains(t, err, "Failed to fetch")
	require.Zero(t, p.demo.orders(t, "k"))
}
