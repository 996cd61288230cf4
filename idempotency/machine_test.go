package idempotency

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func orderMachine(t testing.TB) *Machine {
	t.Helper()
	m, err := NewMachine("order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"}, []string{"paid", "refunded"})
	require.NoError(t, err)
	return m
}

func TestMachine_TellsWhatWasDeclared(t *testing.T) {
	t.Parallel()
	m := orderMachine(t)
	require.Equal(t, "order", m.Name())
	require.Equal(t, []string{"created"}, m.Starts())
	require.Equal(t, []string{"created", "paid", "shipped", "delivered", "refunded"}, m.States())
	require.Equal(t, []Transition{
		{"created", "paid"}, {"paid", "shipped"}, {"paid", "refunded"}, {"shipped", "delivered"},
	}, m.Transitions())
	require.Equal(t, []string{"shipped", "refunded"}, m.Next("paid"))
	require.Empty(t, m.Next("delivered"))
	require.Empty(t, m.Next("nowhere"))
	require.Equal(t, []string{"paid"}, m.Previous("refunded"))
	require.Empty(t, m.Previous("created"))
	require.True(t, m.Allows("created", "paid"))
	require.False(t, m.Allows("created", "shipped"), "no state is skipped")
	require.False(t, m.Allows("paid", "created"), "there is no way back")
	require.False(t, m.Allows("paid", "paid"), "a repeat is no transition")
	require.True(t, m.Leads("created", "delivered"))
	require.False(t, m.Leads("refunded", "delivered"))
	require.False(t, m.Knows("Paid"))

	for _, list := range [][]string{m.States(), m.Starts(), m.Next("paid")} {
		list[0] = "changed"
	}
	require.Equal(t, orderMachine(t), m, "what it hands out is its caller's")
}

func TestMachine_RefusesWithWhatIsAllowed(t *testing.T) {
	t.Parallel()
	m := orderMachine(t)
	err := m.Refuse("paid", "delivered")
	require.ErrorIs(t, err, ErrTransition)
	var refused *TransitionError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, TransitionError{Machine: "order", From: "paid", To: "delivered", Allowed: []string{"shipped", "refunded"}}, *refused)
	require.EqualError(t, err, `idempotency: transition is not allowed: order from "paid" to delivered (allowed from there: shipped, refunded)`)
	require.ErrorContains(t, m.Refuse("refunded", "paid"), "(allowed from there: none)")
	require.NotContains(t, m.Refuse("a\nforged line", "paid").Error(), "\n")

	err = m.Refuse("paid", "'; DROP TABLE orders")
	requireInvalid(t, err, "state", "must be one of created, paid, shipped, delivered, refunded")
	require.NotContains(t, err.Error(), "DROP")
}

func TestNewMachine_NamesTheFieldAndTheRule(t *testing.T) {
	t.Parallel()
	many := make([]string, MaxStates+1)
	for i := range many {
		many[i] = fmt.Sprint("s", i)
	}
	one, long := []string{"a"}, strings.Repeat("x", MaxStateBytes+1)
	for name, test := range map[string]struct {
		name        string
		starts      []string
		paths       [][]string
		field, rule string
	}{
		"no name":           {"", one, [][]string{{"a", "b"}}, "Machine: name", "must not be empty"},
		"long name":         {strings.Repeat("n", 129), one, [][]string{{"a", "b"}}, "Machine: name", "at most 128 bytes"},
		"no start":          {"m", nil, [][]string{{"a", "b"}}, "Machine m: starts", "must name the states"},
		"start twice":       {"m", []string{"a", "a"}, [][]string{{"a", "b"}}, "Machine m: starts[1]", `must not name "a" again`},
		"empty start":       {"m", []string{""}, [][]string{{"a", "b"}}, "Machine m: starts[0]", "must not be empty"},
		"no path":           {"m", one, nil, "Machine m: paths", "must hold a transition"},
		"path of one":       {"m", one, [][]string{{"a", "b"}, {"b"}}, "Machine m: paths[1]", "two states"},
		"empty path":        {"m", one, [][]string{{}}, "Machine m: paths[0]", "two states"},
		"empty state":       {"m", one, [][]string{{"a", ""}}, "Machine m: paths[0][1]", "must not be empty"},
		"blank state":       {"m", one, [][]string{{"a", " "}}, "Machine m: paths[0][1]", "must not be blank"},
		"control character": {"m", one, [][]string{{"a", "b\x00"}}, "Machine m: paths[0][1]", "control characters"},
		"no UTF-8":          {"m", one, [][]string{{"a", "b\xff"}}, "Machine m: paths[0][1]", "valid UTF-8"},
		"long state":        {"m", one, [][]string{{"a", long}}, "Machine m: paths[0][1]", "at most 63 bytes, is 64"},
		"to itself":         {"m", one, [][]string{{"a", "b", "b"}}, "Machine m: paths[0][2]", "another state"},
		"transition twice":  {"m", one, [][]string{{"a", "b"}, {"a", "b", "c"}}, "Machine m: paths[1][1]", `"a" to "b" again`},
		"out of reach":      {"m", one, [][]string{{"a", "b"}, {"c", "b"}}, "Machine m: paths", `must lead from a start to "c"`},
		"misspelt":          {"m", one, [][]string{{"a", "paid"}, {"piad", "shipped"}}, "Machine m: paths", `to "piad"`},
		"an island":         {"m", one, [][]string{{"a", "b"}, {"c", "d", "c"}}, "Machine m: paths", `to "c"`},
		"too many states":   {"m", []string{"s0"}, [][]string{many}, "Machine m: paths[0][100]", "at most 100 states"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := NewMachine(test.name, test.starts, test.paths...)
			require.Nil(t, m)
			require.ErrorIs(t, err, ErrConfig)
			var config *ConfigError
			require.ErrorAs(t, err, &config)
			require.Equal(t, test.field, config.Field)
			require.Contains(t, config.Rule, test.rule)
		})
	}
	for name, test := range map[string]struct{ starts, path []string }{
		"a cycle":             {one, []string{"a", "b", "a"}},
		"a start without end": {[]string{"a", "imported"}, []string{"a", "b"}},
		"as many as allowed":  {[]string{"s0"}, many[:MaxStates]},
	} {
		_, err := NewMachine("m", test.starts, test.path)
		require.NoError(t, err, name)
	}
}

// Against a model that is only a list of edges.
func TestMachine_IsItsEdges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 7).Draw(t, "states")
		edges := map[Transition]bool{}
		var paths [][]string
		name := func(i int) string { return string(rune('a' + i)) }
		for range rapid.IntRange(1, 12).Draw(t, "edges") {
			e := Transition{name(rapid.IntRange(0, n-1).Draw(t, "from")), name(rapid.IntRange(0, n-1).Draw(t, "to"))}
			if e.From != e.To && !edges[e] {
				edges[e] = true
				paths = append(paths, []string{e.From, e.To})
			}
		}
		leads := map[Transition]bool{}
		for e := range edges {
			leads[e] = true
		}
		for k := range n { // Warshall
			for i := range n {
				for j := range n {
					if leads[Transition{name(i), name(k)}] && leads[Transition{name(k), name(j)}] {
						leads[Transition{name(i), name(j)}] = true
					}
				}
			}
		}
		reachable := len(edges) > 0
		for e := range edges {
			reachable = reachable && (e.From == "a" || leads[Transition{"a", e.From}])
		}
		m, err := NewMachine("m", []string{"a"}, paths...)
		if !reachable {
			require.ErrorIs(t, err, ErrConfig)
			return
		}
		require.NoError(t, err)
		require.Len(t, m.Transitions(), len(edges))
		for i := range n {
			for j := range n {
				e := Transition{name(i), name(j)}
				require.Equal(t, edges[e], m.Allows(e.From, e.To))
				require.Equal(t, leads[e], m.Leads(e.From, e.To))
				require.Equal(t, edges[e], slices.Contains(m.Next(e.From), e.To))
				require.Equal(t, edges[e], slices.Contains(m.Previous(e.To), e.From))
			}
		}
	})
}
