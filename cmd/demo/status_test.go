package main

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func (s *shop) put(t *testing.T, location, status string) answer {
	t.Helper()
	return s.do(t, http.MethodPut, location+"/status", http.Header{}, strings.NewReader(status))
}

func TestPutStatus_OnlyTheDeclaredWay(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	placed := s.post(t, "k", coffee)
	order := placed.header.Get("Location")
	require.Contains(t, placed.body, `"status":"created"`)
	requireProblem(t, s.put(t, order, `{"status":"shipped"}`), http.StatusConflict, "transition-refused")
	for _, status := range []string{"paid", "paid", "shipped", "delivered", "delivered"} { // again is no error
		a := s.put(t, order, `{"status":"`+status+`"}`)
		require.Equal(t, http.StatusOK, a.status, a.body)
		require.Contains(t, s.get(t, order).body, `"status":"`+status+`"`)
	}
	refused := s.put(t, order, `{"status":"refunded"}`)
	requireProblem(t, refused, http.StatusConflict, "transition-refused")
	require.Contains(t, refused.body, "It is delivered")
	require.Equal(t, placed.body, s.post(t, "k", coffee).body, "the answer to the order is what it was")

	for _, body := range []string{``, `{}`, `{"status":"lost"}`, `{"status":"paid","x":1}`, `{"status":"paid"}{}`, `{"status":"delivered"}}`, `{"status":"delivered"}]`, `[]`, `{"status":7}`} {
		requireProblem(t, s.put(t, order, body), http.StatusBadRequest, "invalid-request")
	}
	requireProblem(t, s.put(t, "/orders/4711", `{"status":"paid"}`), http.StatusNotFound, "not-found")
	requireProblem(t, s.put(t, "/orders/x", `{"status":"paid"}`), http.StatusNotFound, "not-found")
	requireProblem(t, s.get(t, order+"/status"), http.StatusMethodNotAllowed, "method-not-allowed")
}

// Of those who would ship and those who would refund, one kind wins, and everybody is told which.
func TestPutStatus_RivalsCannotBothWin(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	require.Equal(t, http.StatusOK, s.put(t, order, `{"status":"paid"}`).status)
	var won [2]atomic.Int64
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			status := []string{"shipped", "refunded"}[i%2]
			a, err := s.try(t.Context(), http.MethodPut, order+"/status", http.Header{}, strings.NewReader(`{"status":"`+status+`"}`))
			if err == nil && a.status == http.StatusOK {
				won[i%2].Add(1)
			} else if err != nil || a.status != http.StatusConflict {
				t.Errorf("%v %v %s", err, a.status, a.body)
			}
		})
	}
	group.Wait()
	require.True(t, won[0].Load() == 10 && won[1].Load() == 0 || won[0].Load() == 0 && won[1].Load() == 10, "%d shipped, %d refunded", won[0].Load(), won[1].Load())
}
