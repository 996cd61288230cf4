package edgetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// asked is a request of one of the clients.
type asked struct {
	Key      string `json:"key,omitempty"` // empty: sent without one, and once
	Body     order  `json:"body"`
	Attempts int    `json:"attempts,omitempty"`
}

type order struct {
	Customer string `json:"customer"`
	SKU      string `json:"sku"`
	Quantity int    `json:"quantity"`
}

var coffee = order{"c-7", "coffee", 2}

// answer is what the client made of what it got.
type answer struct {
	Status     int    `json:"status"`
	Replayed   bool   `json:"replayed"`
	RetryAfter string `json:"retryAfter"`
	Text       string `json:"text"`
}

func (a answer) problem(t *testing.T) string {
	t.Helper()
	var p struct {
		Type   string
		Status int
	}
	require.NoError(t, json.Unmarshal([]byte(a.Text), &p), a.Text)
	require.Equal(t, a.Status, p.Status)
	return p.Type
}

// ask sends a request to a path of the service.
type ask func(ctx context.Context, url string, a asked) (answer, error)

// examine has a client see the documented answers.
func examine(t *testing.T, how loss, ask ask) {
	t.Helper()
	d := startDemo(t)
	p := newProxy(t, d)
	examineAt(t, p, how, ask)
}

func examineAt(t *testing.T, p *proxy, how loss, ask ask) {
	t.Helper()
	post := func(a asked) answer {
		t.Helper()
		got, err := ask(t.Context(), p.url+"/orders", a)
		require.NoError(t, err)
		return got
	}
	// The answer is lost after COMMIT. The client does not notice more than that it took longer.
	p.lose("lost", how)
	found := post(asked{Key: "lost", Body: coffee})
	require.Equal(t, http.StatusCreated, found.Status, found.Text)
	require.True(t, found.Replayed)
	require.GreaterOrEqual(t, p.requests("lost"), 2)
	require.Equal(t, 1, p.demo.orders(t, "lost"))

	first := post(asked{Key: "k", Body: coffee})
	require.Equal(t, http.StatusCreated, first.Status, first.Text)
	require.False(t, first.Replayed)
	again := post(asked{Key: "k", Body: coffee})
	require.Equal(t, answer{Status: first.Status, Replayed: true, Text: first.Text}, again, "byte for byte")
	other := post(asked{Key: "k", Body: order{"c-7", "coffee", 3}})
	require.Equal(t, http.StatusUnprocessableEntity, other.Status)
	require.Equal(t, "urn:pgonce:problem:mismatch", other.problem(t))
	require.Equal(t, 3, p.requests("k"), "none of them was worth a retry")
	without := post(asked{Body: coffee})
	require.Equal(t, http.StatusBadRequest, without.Status)
	require.Equal(t, "urn:pgonce:problem:key-missing", without.problem(t))
	for _, replayed := range []bool{false, true} {
		refused := post(asked{Key: "none left", Body: order{"c-7", "unicorn", 1}})
		require.Equal(t, http.StatusBadRequest, refused.Status)
		require.Equal(t, replayed, refused.Replayed)
		require.Equal(t, "urn:pgonce:demo:out-of-stock", refused.problem(t))
	}
	forged, err := ask(t.Context(), p.url+"/checkout", asked{Key: "forged", Body: coffee})
	require.NoError(t, err)
	require.Equal(t, "urn:pgonce:problem:not-issued", forged.problem(t))

	examineInProgress(t, p, ask)
	p.requireCompared(t, "createOrder 201", "createOrder 400", "createOrder 409", "createOrder 422", "checkout 400")
}

// Somebody else is running the key: one attempt is told so, the others wait for the order.
func examineInProgress(t *testing.T, p *proxy, ask ask) {
	t.Helper()
	release := p.demo.hold(t)
	slow := asked{Key: "slow", Body: order{"c-7", "handmade", 1}}
	made := make(chan answer, 1)
	go func() {
		defer close(made)
		got, err := ask(t.Context(), p.url+"/orders", slow)
		if err != nil {
			t.Error(err)
			return
		}
		made <- got
	}()
	require.NoError(t, p.demo.await(t.Context(), 1, thinking))
	once := slow
	once.Attempts = 1
	busy, err := ask(t.Context(), p.url+"/orders", once)
	require.NoError(t, err)
	require.Equal(t, http.StatusConflict, busy.Status, busy.Text)
	require.Equal(t, "urn:pgonce:problem:in-progress", busy.problem(t))
	require.Equal(t, "1", busy.RetryAfter)
	release()
	second, err := ask(t.Context(), p.url+"/orders", slow)
	require.NoError(t, err)
	first := <-made
	require.Equal(t, http.StatusCreated, first.Status, first.Text)
	require.False(t, first.Replayed)
	require.Equal(t, answer{Status: first.Status, Replayed: true, Text: first.Text}, second)
	require.Equal(t, 1, p.demo.orders(t, "slow"))
}

func TestGoClient_SeesTheDocumentedAnswers(t *testing.T) {
	t.Parallel()
	base := &http.Transport{}
	t.Cleanup(base.CloseIdleConnections)
	examine(t, cut, func(ctx context.Context, url string, a asked) (got answer, err error) {
		body, err := json.Marshal(a.Body)
		if err != nil {
			return got, err
		}
		client := &http.Client{Transport: base}
		if a.Key != "" {
			transport, err := idempotencyclient.New(base, &idempotencyclient.Config{Attempts: a.Attempts})
			if err != nil {
				return got, err
			}
			client.Transport = transport
			ctx = idempotencyclient.WithKey(ctx, a.Key)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			return got, err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := idempotencyclient.Do(client, req)
		var problem *idempotencyclient.ProblemError
		switch {
		case errors.As(err, &problem):
			got = answer{Status: problem.Status, Replayed: problem.Replayed, Text: string(problem.Body)}
			if problem.RetryAfter > 0 {
				got.RetryAfter = map[bool]string{true: "1", false: "?"}[problem.RetryAfter.Seconds() == 1]
			}
			return got, nil
		case err != nil:
			return got, err
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close() // it has been read
		return answer{Status: resp.StatusCode, Replayed: idempotencyclient.Replayed(resp), Text: string(text)}, err
	})
}

func TestNodeClient_SeesTheDocumentedAnswers(t *testing.T) {
	t.Parallel()
	node := pgtest.Program(t, "node")
	for name, how := range map[string]loss{"no answer": cut, "half an answer": half} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			examine(t, how, func(ctx context.Context, url string, a asked) (got answer, err error) {
				options, err := json.Marshal(a)
				if err != nil {
					return got, err
				}
				cmd := exec.CommandContext(ctx, node, "testdata/node.mjs", url, string(options))
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.Output()
				if err != nil {
					return got, errors.Join(err, errors.New(stderr.String()))
				}
				err = json.Unmarshal(out, &got)
				return got, err
			})
		})
	}
}
