package sqlsuite

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

var update = flag.Bool("update", false, "write psql's answers into docs/sql_api.md instead of comparing them")

const guide = "../../docs/sql_api.md"

// part is a piece of the guide's session with what psql prints for it, if it prints anything.
var part = regexp.MustCompile("(?s)```sql\n(.*?\n)```\n(?:```text\n(.*?\n)```\n)?")

// The guide's session, typed into psql as it is printed.
func TestGuide_PsqlSaysWhatIsPrinted(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `CREATE ROLE my_service`) // the server is this test binary's
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))

	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	parts := part.FindAllSubmatchIndex(text, -1)
	require.Len(t, parts, strings.Count(string(text), "```sql\n"))
	require.Greater(t, len(parts), 6)
	const end = "-- end of a part"
	var session strings.Builder
	for _, p := range parts {
		session.Write(text[p[2]:p[3]])
		session.WriteString("\\echo '" + end + "'\n")
	}
	cmd := exec.CommandContext(t.Context(), "psql", "-X", "-q", "-v", "VERBOSITY=terse", url)
	cmd.Stdin = strings.NewReader(session.String())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out // errors in their place
	cmd.Env = append(os.Environ(), "PAGER=", "LC_ALL=C")
	require.NoError(t, cmd.Run(), out.String())
	// psql fills columns with spaces, and ends tables with a line that is empty.
	trimmed := regexp.MustCompile(`(?m) +$`).ReplaceAllString(out.String(), "")
	said := strings.Split(trimmed, end+"\n")
	for i, one := range said {
		if rest, table := strings.CutSuffix(one, "\n\n"); table {
			said[i] = rest + "\n"
		}
	}
	require.Len(t, said, len(parts)+1)
	require.Empty(t, said[len(parts)])

	updated, last := "", 0
	for i, p := range parts {
		if p[4] < 0 {
			require.Empty(t, said[i], string(text[p[2]:p[3]]))
			continue
		}
		if *update {
			updated, last = updated+string(text[last:p[4]])+said[i], p[5]
			continue
		}
		require.Equal(t, string(text[p[4]:p[5]]), said[i], string(text[p[2]:p[3]]))
	}
	if *update {
		require.NoError(t, os.WriteFile(guide, []byte(updated+string(text[last:])), 0o644))
	}
}

// The guide's JavaScript is the tested client's.
func TestGuide_JavaScriptIsTheClients(t *testing.T) {
	t.Parallel()
	client, err := os.ReadFile("node/client.js")
	require.NoError(t, err)
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```js\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, 1)
	require.Contains(t, string(client), blocks[0][1])
	require.NotEmpty(t, strings.TrimSpace(blocks[0][1]))
}
