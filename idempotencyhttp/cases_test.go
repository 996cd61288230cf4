package idempotencyhttp_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

func TestCase_H01_QuotedAndBareAreOneKeyAndMalformedIsNone(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	first := s.post(t, `abc`, "")
	require.Equal(t, http.StatusCreated, first.status)
	for _, same := range []string{`"abc"`, ` abc `, "\t\"abc\" "} {
		again := s.post(t, same, "")
		require.True(t, again.replayed(), same)
		require.Equal(t, first.body, again.body)
	}
	for _, other := range []string{`'abc'`, `abc, def`, `a"bc`, `"a\"b\\c"`, `abc;p=1`, `?1`, `:YQ==:`, `1`} {
		a := s.post(t, other, "")
		require.Equal(t, http.StatusCreated, a.status, other)
		require.False(t, a.replayed(), other)
	}
	for _, wrong := range []string{`"abc`, `"`, `"abc"def`, `"abc";p=1`, `"abc";p`, `"abc", "def"`, `"a\bc"`, `"abc\`, `"schlüssel"`, `schlüssel`, "a\x80", `""`, `"  "`} {
		p := requireProblem(t, s.post(t, wrong, ""), http.StatusBadRequest, "key-invalid")
		require.Equal(t, idempotencyhttp.HeaderKey, p.Field)
		require.NotEmpty(t, p.Rule)
	}
	for _, two := range [][]string{{"abc", "abc"}, {"abc", ""}, {`"abc"`, `"def"`}} {
		requireProblem(t, s.send(t, http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: two}, nil), http.StatusBadRequest, "key-invalid")
	}
	require.Equal(t, 1, s.orders(t, "abc"))
}

func TestCase_H01_StrictTakesQuotedKeysOnly(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place, func(c *idempotencyhttp.Config) { c.Strict = true })
	require.Equal(t, http.StatusCreated, s.post(t, `"abc"`, "").status)
	for _, bare := range []string{`abc`, `'abc'`, `1`, `?1`, `:YQ==:`} {
		requireProblem(t, s.post(t, bare, ""), http.StatusBadRequest, "key-invalid")
	}
}

func TestCase_H03_BlankIsNoKeyAndNothingIsTrimmedInQuotes(t *testing.T) {
	t.Parallel()
	for _, optional := range []bool{false, true} {
		s := newSite(t).serve(t, place, func(c *idempotencyhttp.Config) { c.Optional = optional })
		for _, blank := range []string{``, ` `, "\t", `""`, `" "`, `"   "`} {
			requireProblem(t, s.post(t, blank, ""), http.StatusBadRequest, "key-invalid")
		}
		require.Equal(t, http.StatusCreated, s.post(t, `k`, "").status)
		require.True(t, s.post(t, ` k `, "").replayed(), "space around a header's value is not part of it")
		require.False(t, s.post(t, `" k "`, "").replayed(), "in quotes it is")
		require.Equal(t, 1, s.orders(t, " k "))
	}
}

func TestCase_H04_LongKeysAreRefusedAndNeverCut(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	for _, n := range []int{1, 36, 254, 255} {
		require.Equal(t, http.StatusCreated, s.post(t, strings.Repeat("k", n), "").status)
		require.Equal(t, http.StatusCreated, s.post(t, `"`+strings.Repeat("q", n)+`"`, "").status, "quotes do not count")
	}
	for _, n := range []int{256, 8000} {
		p := requireProblem(t, s.post(t, strings.Repeat("k", n), ""), http.StatusBadRequest, "key-invalid")
		require.Contains(t, p.Rule, "255 bytes")
	}
	require.False(t, s.post(t, strings.Repeat("k", 253)+"x", "").replayed(), "one prefix, another key")
}

// bearer is the tenant of the tests with more than one: whoever the token is of.
func bearer(r *http.Request) (string, error) {
	who, known := map[string]string{"Bearer a": "a", "Bearer b": "b"}[r.Header.Get("Authorization")]
	if !known {
		return "", &idempotencyhttp.Problem{Type: "urn:example:who", Title: "Who are you?", Status: http.StatusUnauthorized}
	}
	return who, nil
}

func TestCase_H06_TenantsNeverSeeEachOther(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	once, err := idempotencyhttp.New(s.runner, bearer, nil)
	require.NoError(t, err)
	block, blocked := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(block) })
	defer release()
	s.open(t, once.Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			close(blocked)
			<-block
		}
		place(w, r)
	})))
	as := func(who, path, body string) (answer, error) {
		h := http.Header{idempotencyhttp.HeaderKey: {"1"}, "Authorization": {"Bearer " + who}}
		return s.try(t.Context(), http.MethodPost, path, h, strings.NewReader(body))
	}
	var slow answer
	var slowErr error
	var group sync.WaitGroup
	group.Go(func() { slow, slowErr = as("a", "/slow", "body") })
	<-blocked
	b, err := as("b", "/slower", "other body")
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, b.status, "A cannot block B")
	require.False(t, b.replayed())
	release()
	group.Wait()
	require.NoError(t, slowErr)
	require.Equal(t, http.StatusCreated, slow.status)
	require.NotEqual(t, slow.body, b.body)
	again, err := as("b", "/slower", "other body")
	require.NoError(t, err)
	require.True(t, again.replayed())
	require.Equal(t, b.body, again.body)
	none, err := as("nobody", "/", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, none.status)
	require.Contains(t, none.body, "Who are you?")
}

func TestCase_H07_ATenantIsAChoiceAndNeverEmpty(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	_, err := idempotencyhttp.New(s.runner, nil, nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "SingleTenant")
	for name, tenant := range map[string]idempotencyhttp.Tenant{
		"Empty": func(*http.Request) (string, error) { return "", nil },
		"Blank": func(*http.Request) (string, error) { return " ", nil },
		"Long":  func(*http.Request) (string, error) { return strings.Repeat("t", 129), nil },
		"Error": func(*http.Request) (string, error) { return "a", errors.New("secret") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, log := s.another(), &logBuffer{}
			once, err := idempotencyhttp.New(s.runner, tenant, &idempotencyhttp.Config{Log: logTo(log)})
			require.NoError(t, err)
			s.open(t, once.Operation(create.Name)(http.HandlerFunc(place)))
			a := s.post(t, "k", "")
			problem := "program-error"
			if name == "Error" { // of the function: it may know better a moment later
				problem = "internal"
			}
			requireProblem(t, a, http.StatusInternalServerError, problem)
			require.NotContains(t, a.body, "secret")
			require.NotEmpty(t, log.String())
			s.requireState(t, "k", "")
		})
	}
	s.serve(t, place)
	first := s.send(t, http.MethodPost, "/", http.Header{idempotencyhttp.HeaderKey: {"ip"}, "X-Forwarded-For": {"10.0.0.1"}}, nil)
	again := s.send(t, http.MethodPost, "/", http.Header{idempotencyhttp.HeaderKey: {"ip"}, "X-Forwarded-For": {"10.0.0.2"}}, nil)
	require.Equal(t, first.body, again.body, "no header that clients choose says whose a key is")
}

func TestCase_H08_MissingIsRefusedOrPassesUnprotected(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	p := requireProblem(t, s.send(t, http.MethodPost, "/orders", nil, nil), http.StatusBadRequest, "key-missing")
	require.Equal(t, idempotencyhttp.HeaderKey, p.Field)

	var passed count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, inside := txn.FromContext(r.Context())
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprint(w, inside, " ", string(body))
	}, func(c *idempotencyhttp.Config) {
		c.Optional, c.Untransacted = true, true
		c.OnUnprotected = func(*http.Request) { passed.add() }
	})
	require.Equal(t, "false body", s.send(t, http.MethodPost, "/orders", nil, strings.NewReader("body")).body)
	require.Equal(t, 1, passed.get())
	require.Equal(t, "true body", s.post(t, "k", "body").body)
	require.Equal(t, 1, passed.get())
	var rows int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.records`).Scan(&rows))
	require.Equal(t, 1, rows, "of the one with a key")
}

// The set-up of docs/http.md: whoever answers CORS stands before us.
func TestCase_H10_PreflightIsNeverIntercepted(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	inner := s.middleware(t).Operation(create.Name)(http.HandlerFunc(place))
	s.open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.Header().Add("Vary", "Origin")
		w.Header().Set("Access-Control-Expose-Headers", "Idempotent-Replayed, Retry-After, Location")
		if r.Method == http.MethodOptions {
			w.Header().Set("Access-Control-Allow-Methods", "POST")
			w.Header().Set("Access-Control-Allow-Headers", "Content-Type, Idempotency-Key")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	preflight := http.Header{"Origin": {"https://a.example"}, "Access-Control-Request-Headers": {"idempotency-key"}}
	require.Equal(t, http.StatusNoContent, s.send(t, http.MethodOptions, "/orders", preflight, nil).status)
	for i, origin := range []string{"https://a.example", "https://b.example"} {
		a := s.send(t, http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {"k"}, "Origin": {origin}}, nil)
		require.Equal(t, http.StatusCreated, a.status)
		require.Equal(t, i > 0, a.replayed())
		require.Equal(t, origin, a.header.Get("Access-Control-Allow-Origin"), "a replay has that of its own request")
		require.Contains(t, a.header.Get("Access-Control-Expose-Headers"), idempotencyhttp.HeaderReplayed)
	}
	s.serve(t, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X-Method", r.Method) })
	require.Equal(t, http.MethodOptions, s.send(t, http.MethodOptions, "/orders", preflight, nil).header.Get("X-Method"))
}

func TestCase_P08_WhoeverLosesTheRaceIsToldTheWinnersOutcome(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(idempotencyhttp.HeaderKey) == "k" {
			// Somebody who does not know the lock records the key while the handler runs: only the unique key is left.
			_, err := s.pool.Exec(r.Context(), `
				INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
					expires_at, fingerprint, attempt_token, executor, result_type, result)
				SELECT tenant, operation, 'k', state, f, f, 1, created_at, acquired_at, completed_at,
					expires_at, fingerprint, substring(sha256('other') for 16), 'sql', result_type, result
				FROM idempotency.records, nextval('idempotency.fence') AS f WHERE key = 'winner'`)
			if err != nil {
				panic(err)
			}
		}
		place(w, r)
	})
	winner := s.post(t, "winner", "body")
	loser := s.post(t, "k", "body")
	require.Equal(t, http.StatusCreated, loser.status)
	require.True(t, loser.replayed())
	require.Equal(t, winner.body, loser.body)
	require.Zero(t, s.orders(t, "k"))
	require.Empty(t, s.log.String())
}

func TestCase_P08_ARaceOfTwoProcessesHasNo500(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, place)
	other := *s
	var err error
	other.runner, err = txn.New(s.pool, &txn.Config{Operations: []idempotency.Operation{{Name: create.Name, Wait: idempotency.NoWait}}})
	require.NoError(t, err)
	other.serve(t, place)
	for i := range 30 {
		key := fmt.Sprint("k-", i)
		answers, errs := make([]answer, 2), make([]error, 2)
		var group sync.WaitGroup
		for j, site := range []*site{s, &other} {
			group.Go(func() {
				answers[j], errs[j] = site.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {key}}, nil)
			})
		}
		group.Wait()
		require.NoError(t, errors.Join(errs...))
		for _, a := range answers {
			if a.status == http.StatusConflict {
				requireProblem(t, a, http.StatusConflict, "in-progress")
				continue
			}
			require.Equal(t, http.StatusCreated, a.status, a.body)
		}
		require.Equal(t, 1, s.orders(t, key))
	}
	require.Empty(t, s.log.String())
}
