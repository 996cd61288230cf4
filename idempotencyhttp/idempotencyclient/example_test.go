package idempotencyclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"

	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

// order orders a tea. It is told what became of it, however often the connection breaks.
func order(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/orders", strings.NewReader(`{"sku":"tea"}`))
	if err != nil {
		return "", err
	}
	resp, err := idempotencyclient.Do(client, req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	return string(answer), err
}

func newShopClient() (*http.Client, error) {
	transport, err := idempotencyclient.New(nil, nil)
	if err != nil {
		return nil, err
	}
	return &http.Client{Transport: transport}, nil
}

func Example() {
	var requests atomic.Int64
	shop := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			panic(http.ErrAbortHandler) // the order is made, and its answer is lost
		}
		w.Header().Set(idempotencyclient.HeaderReplayed, "true")
		_, _ = fmt.Fprint(w, "order 7")
	}))
	defer shop.Close()

	client, err := newShopClient()
	if err != nil {
		panic(err)
	}
	answer, err := order(context.Background(), client, shop.URL)
	fmt.Println(answer, err, requests.Load())
	// Output: order 7 <nil> 2
}

// A key that must survive the client's process is stored with what it is for, before anything is sent.
func ExampleWithKey() {
	shop := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, "the order of ", r.Header.Get(idempotencyclient.HeaderKey))
	}))
	defer shop.Close()

	client, err := newShopClient()
	if err != nil {
		panic(err)
	}
	answer, err := order(idempotencyclient.WithKey(context.Background(), "cart-4711"), client, shop.URL)
	fmt.Println(answer, err)
	// Output: the order of "cart-4711" <nil>
}

func ExampleProblemError() {
	shop := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = fmt.Fprint(w, `{"type":"urn:pgonce:problem:mismatch","title":"This key was used for another request.","status":422}`)
	}))
	defer shop.Close()

	client, err := newShopClient()
	if err != nil {
		panic(err)
	}
	_, err = order(context.Background(), client, shop.URL)
	var problem *idempotencyclient.ProblemError
	switch {
	case errors.Is(err, idempotencyclient.ErrOutcomeUnknown):
		fmt.Println("ask again with the same key")
	case errors.Is(err, idempotencyclient.ErrMismatch):
		fmt.Println("a key for two requests: mend the client")
	}
	if errors.As(err, &problem) {
		fmt.Println(problem.Status, problem.Title)
	}
	// Output:
	// a key for two requests: mend the client
	// 422 This key was used for another request.
}
