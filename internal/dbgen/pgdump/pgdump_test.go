package pgdump

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNormalise_KeepsWhatIsTheSchema(t *testing.T) {
	t.Parallel()
	const object = "CREATE FUNCTION s.f() RETURNS integer\n    LANGUAGE sql\n    AS $$\n-- a comment\nSELECT 1\n$$;\n"
	old := "--\n-- PostgreSQL database dump\n--\n\n-- Dumped from database version 15.18\n-- Dumped by pg_dump version 15.18\n\n" +
		"SET statement_timeout = 0;\nSELECT pg_catalog.set_config('search_path', '', false);\n\n" +
		"--\n-- Name: f(); Type: FUNCTION; Schema: s; Owner: -\n--\n\n" + object + "\n\n" +
		"--\n-- PostgreSQL database dump complete\n--\n\n"
	newer := "--\n-- PostgreSQL database dump\n--\n\n\\restrict abc\n\n-- Dumped from database version 18.4\n" +
		"-- Dumped by pg_dump version 18.4\n\nSET statement_timeout = 0;\nSET transaction_timeout = 0;\n" +
		"SELECT pg_catalog.set_config('search_path', '', false);\n\n" +
		"--\n-- Name: f(); Type: FUNCTION; Schema: s; Owner: -\n--\n\n" + object + "\n\n" +
		"--\n-- PostgreSQL database dump complete\n--\n\n\\unrestrict abc\n\n"

	require.Equal(t, object, normalise(old))
	require.Equal(t, object, normalise(newer))
}

func TestNormalise_WritesViewsAsNewServersDo(t *testing.T) {
	t.Parallel()
	const (
		old = "CREATE VIEW s.v AS\n SELECT r.a,\n    (r.b - r.a) AS d\n   FROM s.records r\n  WHERE (r.a > 0);\n"
		now = "CREATE VIEW s.v AS\n SELECT a,\n    (b - a) AS d\n   FROM s.records r\n  WHERE (a > 0);\n"
		two = "CREATE VIEW s.w AS\n SELECT r.a,\n    q.b\n   FROM (s.records r\n     JOIN s.others q ON ((r.a = q.a)));\n"
	)
	require.Equal(t, now, normalise(old))
	require.Equal(t, now, normalise(now))
	require.Equal(t, two, normalise(two))
}
