package ids_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/ids"
)

func tokenKey(id string, secret byte) ids.TokenKey {
	return ids.TokenKey{ID: id, Secret: bytes.Repeat([]byte{secret}, 32)}
}

func newTokens(t testing.TB, keys ...ids.TokenKey) *ids.Tokens {
	t.Helper()
	tokens, err := ids.NewTokens(&ids.TokensConfig{Keys: keys})
	require.NoError(t, err)
	return tokens
}

func TestTokens_FormAndOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		unsigned, signed := newTokens(t), newTokens(t, tokenKey("2026-a", 1))
		var all []string
		for range 1000 {
			value := unsigned.Make("acme", "order.create")
			require.Regexp(t, `^[0-9A-HJKMNP-TV-Z]{26}$`, value)
			require.NoError(t, unsigned.Verify("acme", "order.create", value))
			all = append(all, value)
			time.Sleep(time.Millisecond)
			value = signed.Make("acme", "order.create")
			require.Regexp(t, `^[0-9A-HJKMNP-TV-Z]{26}\.2026-a\.[A-Za-z0-9_-]{43}$`, value)
			require.NoError(t, signed.Verify("acme", "order.create", value))
			all = append(all, value)
			time.Sleep(time.Millisecond)
		}
		require.True(t, slices.IsSorted(all), "byte by byte, as the primary key sorts them")
	})
	// Of one millisecond too.
	tokens, seen := newTokens(t), map[string]bool{}
	for range 100_000 {
		seen[tokens.Make("acme", "order.create")] = true
	}
	require.Len(t, seen, 100_000)
}

// The longest names still make a key.
func TestTokens_FitIntoAKey(t *testing.T) {
	t.Parallel()
	tokens := newTokens(t, tokenKey(strings.Repeat("k", 32), 1))
	tenant, operation := strings.Repeat("t", 128), strings.Repeat("o", 128)
	_, err := idempotency.NewKey(tenant, operation, tokens.Make(tenant, operation))
	require.NoError(t, err)
}

func TestTokens_WhatWasNotIssuedIsRefused(t *testing.T) {
	t.Parallel()
	signer, unsigned := newTokens(t, tokenKey("a", 1)), newTokens(t)
	good := signer.Make("acme", "order.create")
	body, signature := good[:26], good[29:]
	other := signer.Make("acme", "order.create")
	refused := func(why string, tokens *ids.Tokens, tenant, operation, value string) {
		t.Helper()
		err := tokens.Verify(tenant, operation, value)
		require.ErrorIs(t, err, idempotency.ErrNotIssued, value)
		require.ErrorContains(t, err, why, value)
		var token *ids.TokenError
		require.ErrorAs(t, err, &token)
		if len(value) > 10 {
			require.NotContains(t, err.Error(), value)
		}
	}
	const forged, form = "does not fit", "has not the form"
	refused(forged, signer, "evil", "order.create", good)
	refused(forged, signer, "acme", "order.cancel", good)
	refused(forged, signer, "acmeorder", ".create", good)
	refused(forged, newTokens(t, tokenKey("a", 2)), "acme", "order.create", good)
	refused(forged, signer, "acme", "order.create", other[:26]+good[26:])
	refused(forged, signer, "acme", "order.create", good[:len(good)-1])
	refused(forged, signer, "acme", "order.create", good+"A")
	refused(forged, signer, "acme", "order.create", body+".a")
	refused(forged, signer, "acme", "order.create", body+".a.")
	refused(forged, signer, "acme", "order.create", body+".a."+strings.Repeat("A", 43))
	// Base 64 has another spelling of the same bytes: the last character's low bits mean nothing.
	last := signature[len(signature)-1]
	refused(forged, signer, "acme", "order.create", good[:len(good)-1]+string(last+1))
	refused("not signed", signer, "acme", "order.create", body)
	refused("does not have", signer, "acme", "order.create", body+".b."+signature)
	refused("does not have", signer, "acme", "order.create", body+"..")
	refused("no keys", unsigned, "acme", "order.create", good)
	for _, value := range []string{"", "k", strings.Repeat("0", 25), strings.Repeat("0", 27), strings.ToLower(body), " " + body, strings.Repeat("I", 26)} {
		refused(form, unsigned, "acme", "order.create", value)
		refused(form, signer, "acme", "order.create", value)
	}
	require.NoError(t, signer.Verify("acme", "order.create", good))
	require.NoError(t, unsigned.Verify("acme", "order.create", body), "whether it was issued, PostgreSQL knows")
}

func TestTokens_KeysAreRotated(t *testing.T) {
	t.Parallel()
	a, b := tokenKey("a", 1), tokenKey("b", 2)
	before, both, turned, after := newTokens(t, a), newTokens(t, a, b), newTokens(t, b, a), newTokens(t, b)
	const tenant, operation = "acme", "order.create"
	old, young := before.Make(tenant, operation), turned.Make(tenant, operation)
	require.Contains(t, both.Make(tenant, operation), ".a.")
	require.Contains(t, young, ".b.")
	for _, tokens := range []*ids.Tokens{both, turned} {
		require.NoError(t, tokens.Verify(tenant, operation, old))
		require.NoError(t, tokens.Verify(tenant, operation, young))
	}
	require.ErrorIs(t, after.Verify(tenant, operation, old), idempotency.ErrNotIssued)
	require.NoError(t, after.Verify(tenant, operation, young))
}

func TestNewTokens_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		keys  []ids.TokenKey
		field string
	}{
		{[]ids.TokenKey{{ID: "", Secret: make([]byte, 32)}}, "TokensConfig.Keys[0].ID"},
		{[]ids.TokenKey{{ID: "a.b", Secret: make([]byte, 32)}}, "TokensConfig.Keys[0].ID"},
		{[]ids.TokenKey{tokenKey("a", 1), tokenKey("a", 2)}, "TokensConfig.Keys[1].ID"},
		{[]ids.TokenKey{{ID: "a", Secret: []byte("open sesame")}}, "TokensConfig.Keys[0].Secret"},
	} {
		_, err := ids.NewTokens(&ids.TokensConfig{Keys: c.keys})
		var wrong *idempotency.ConfigError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, c.field, wrong.Field)
		require.NotContains(t, err.Error(), "sesame")
	}
}

func FuzzTokens_Verify(f *testing.F) {
	tokens := newTokens(f, tokenKey("a", 1))
	// Made once: fuzzing runs in several processes, and what one of them makes is good in all.
	const good = "06H2RY2AQKVG749BP3SXG3MXHG.a.yIZ9Cv97p3fOviIB8Ost9mdH5HOCjRDukUAUh8thz78"
	require.NoError(f, tokens.Verify("acme", "order.create", good), "a token of an older release")
	f.Add("acme", "order.create", good)
	f.Add("acme", "order.create", good[:26])
	f.Add("acme", "order.create", "..")
	f.Fuzz(func(t *testing.T, tenant, operation, value string) {
		if tokens.Verify(tenant, operation, value) == nil && (tenant != "acme" || operation != "order.create" || value != good) {
			t.Fatalf("accepted: %q %q %q", tenant, operation, value)
		}
	})
}

func BenchmarkTokens(b *testing.B) {
	tokens := newTokens(b, tokenKey("a", 1))
	value := tokens.Make("acme", "order.create")
	b.Run("Make", func(b *testing.B) {
		for b.Loop() {
			tokens.Make("acme", "order.create")
		}
	})
	b.Run("Verify", func(b *testing.B) {
		for b.Loop() {
			_ = tokens.Verify("acme", "order.create", value)
		}
	})
}
