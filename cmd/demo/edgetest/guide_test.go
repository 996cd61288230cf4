package edgetest

import (
	"bytes"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

var update = flag.Bool("update", false, "write the demo's answers into docs/http.md instead of comparing them")

const guide = root + "/docs/http.md"

// part is a piece of the guide's session with what curl prints for it.
var part = regexp.MustCompile("(?s)```sh\n(.*?\n)```\n```text\n(.*?)```\n")

// changing is what is another every time.
var changing = []struct {
	is *regexp.Regexp
	to string
}{
	{regexp.MustCompile(`\r`), ""},
	{regexp.MustCompile(`(?m)^(Date|Content-Length|Pgonce-Answered-By): .*\n`), ""},
	{regexp.MustCompile(`"created_at":"[^"]*"`), `"created_at":"2026-11-30T12:00:00.000000Z"`},
}

func session(t *testing.T) (text []byte, parts [][]int) {
	t.Helper()
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	parts = part.FindAllSubmatchIndex(text, -1)
	require.Len(t, parts, strings.Count(string(text), "```sh\n"))
	require.Greater(t, len(parts), 5)
	return text, parts
}

// bash runs commands of the guide on the demo behind p. What the guide's reader waits for is an event here.
func bash(t *testing.T, p *proxy, commands string) string {
	t.Helper()
	curl := pgtest.Program(t, "curl")
	release := p.demo.hold(t)
	events := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/over" {
			release()
		} else if err := p.demo.await(r.Context(), 1, thinking); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	defer events.Close()
	require.Equal(t, 1, strings.Count(commands, "shop=http://127.0.0.1:8080\n"))
	commands = strings.Replace(commands, "http://127.0.0.1:8080", p.url, 1)
	cmd := exec.CommandContext(t.Context(), "bash", "-eu")
	cmd.Stdin = strings.NewReader("sleep() { curl -sS " + events.URL + "; }\nwait() { curl -sS " + events.URL + "/over; builtin wait; }\n" + commands)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH="+filepath.Dir(curl)+":"+os.Getenv("PATH"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out // errors in their place
	require.NoError(t, cmd.Run(), out.String())
	said := out.String()
	for _, one := range changing {
		said = one.is.ReplaceAllString(said, one.to)
	}
	return said
}

// The guide's commands are what is run, and their answers are what is printed there.
func TestGuide_CurlSeesWhatIsPrinted(t *testing.T) {
	t.Parallel()
	text, parts := session(t)
	const end = "end of a part"
	var commands strings.Builder
	for _, one := range parts {
		commands.Write(text[one[2]:one[3]])
		commands.WriteString("echo '" + end + "'\n")
	}
	p := newProxy(t, startDemo(t))
	said := strings.Split(bash(t, p, commands.String()), end+"\n")
	require.Len(t, said, len(parts)+1)
	require.Empty(t, said[len(parts)])
	updated, last := "", 0
	for i, one := range parts {
		if *update {
			updated, last = updated+string(text[last:one[4]])+said[i], one[5]
			continue
		}
		require.Equal(t, string(text[one[4]:one[5]]), said[i], string(text[one[2]:one[3]]))
	}
	if *update {
		require.NoError(t, os.WriteFile(guide, []byte(updated+string(text[last:])), 0o644))
	}
	p.requireCompared(t, "createOrder 201", "createOrder 400", "createOrder 409", "createOrder 422", "payOrder 200", "moveOrder 200",
		"moveOrder 409", "issueToken 201", "checkout 201", "checkout 400")
	require.Equal(t, 1, p.demo.orders(t, "my-first"))
	require.Equal(t, 1, p.demo.orders(t, "slow"))
}

// curl's own retry, as the guide has it, finds the order whose answer was lost.
func TestGuide_CurlTriesAgainByItself(t *testing.T) {
	t.Parallel()
	text, parts := session(t)
	last := parts[len(parts)-1]
	command := string(text[last[2]:last[3]])
	require.Contains(t, command, "--retry ")
	for name, how := range map[string]loss{"no answer": cut, "half an answer": half} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newProxy(t, startDemo(t, "-strict"))
			p.lose("my-last", how)
			said := bash(t, p, "shop=http://127.0.0.1:8080\n"+command)
			_, answer, found := strings.Cut(said, "Idempotent-Replayed: true\n")
			require.True(t, found, said)
			require.Contains(t, answer, `"sku":"tea"`)
			require.GreaterOrEqual(t, p.requests("my-last"), 2)
			require.Equal(t, 1, p.demo.orders(t, "my-last"))
		})
	}
}

// The guide's JavaScript is the tested client's.
func TestGuide_JavaScriptIsTheClients(t *testing.T) {
	t.Parallel()
	client, err := os.ReadFile("testdata/client.mjs")
	require.NoError(t, err)
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```js\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, 1)
	require.Equal(t, string(client), blocks[0][1])
}
