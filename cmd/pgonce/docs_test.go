package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOperatorGuide_EveryCommandRuns(t *testing.T) {
	t.Parallel()
	pool, node := audited(t), newRedis(t)
	text, err := os.ReadFile("../../docs/operator.md")
	require.NoError(t, err)
	word := regexp.MustCompile(`'[^']*'|\S+`)
	ran := map[string]bool{}
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		for line := range strings.Lines(block[1]) {
			words := word.FindAllString(strings.ReplaceAll(line, "redis://cache:6379/0", node.URL()), -1)
			for i := range words {
				words[i] = strings.Trim(words[i], "'")
			}
			require.Equal(t, "pgonce", words[0])
			want := exitOK
			if words[1] == "doctor" { // the records are stale, and the tests' server has its defaults
				want = exitRefused
			}
			a := pgonce(t, urlOf(pool), "", words[1:]...)
			require.Equal(t, want, a.code, "%s%s%s", line, a.out, a.err)
			ran[words[1]] = true
		}
	}
	for _, command := range newRoot(&world{}).Commands() {
		if name := command.Name(); name != "help" && name != "completion" {
			require.True(t, ran[name], "%s is not in the guide", name)
		}
	}
}
