// Package docs_test keeps the documents in step with the code.
package docs_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", filepath.FromSlash(name)))
	require.NoError(t, err)
	return string(text)
}

// files returns the repository's files with this ending, below the root.
func files(t *testing.T, ending string) (found []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && (d.Name() == "bin" || d.Name() == ".git") {
			return fs.SkipDir
		}
		if err == nil && strings.HasSuffix(path, ending) {
			found = append(found, filepath.ToSlash(strings.TrimPrefix(path, ".."+string(filepath.Separator))))
		}
		return err
	}))
	return found
}

func TestRules_EveryPlaceExists(t *testing.T) {
	t.Parallel()
	var tests strings.Builder
	for _, name := range files(t, "_test.go") {
		tests.WriteString(read(t, name))
	}
	row := regexp.MustCompile("(?m)^\\| .+ \\| `([^`]+)` `([^`]+)` \\| `([^`]+)` \\|$")
	rows := row.FindAllStringSubmatch(read(t, "docs/rules.md"), -1)
	require.Greater(t, len(rows), 40)
	lines := regexp.MustCompile(`(?m)^\| [^-]`).FindAllString(read(t, "docs/rules.md"), -1)
	heads := strings.Count(read(t, "docs/rules.md"), "| rule | code | test |")
	require.Len(t, rows, len(lines)-heads, "every row has the form: rule, `file` `text`, `test`")
	for _, r := range rows {
		// True, and not Contains: a failure would print the whole file.
		require.True(t, strings.Contains(read(t, r[1]), r[2]), "not in %s: %s", r[1], r[2])
		require.True(t, regexp.MustCompile(`func `+r[3]+`\w*\(`).MatchString(tests.String()), "no test begins with %s", r[3])
	}
}

func TestMisuse_EveryTestExists(t *testing.T) {
	t.Parallel()
	var tests strings.Builder
	for _, name := range files(t, "_test.go") {
		tests.WriteString(read(t, name))
	}
	rows := 0
	for _, line := range strings.Split(read(t, "docs/misuse.md"), "\n") {
		if !strings.HasPrefix(line, "| ") || line == "| the function | the caller gets | stored | test |" {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		require.Len(t, cells, 4, line)
		named := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(cells[3], -1)
		require.NotEmpty(t, named, "no test: %s", line)
		for _, m := range named {
			require.True(t, strings.Contains(tests.String(), "\nfunc "+m[1]+"("), "no test is called %s", m[1])
		}
	}
	require.Greater(t, rows, 30)
}

func TestDefaults_TableIsTheCode(t *testing.T) {
	t.Parallel()
	text := read(t, "docs/defaults.md")
	op := idempotency.Operation{Name: "x"}.WithDefaults()
	human := func(d time.Duration) string {
		if d%time.Hour == 0 {
			return fmt.Sprintf("%d h", d/time.Hour)
		}
		return fmt.Sprintf("%d s", d/time.Second)
	}
	thousands := func(n int) string { return fmt.Sprintf("%d,%03d", n/1000, n%1000) }
	for _, row := range []string{
		"| Wait | " + human(op.Wait) + " |",
		"| Retention | " + human(op.Retention) + " |",
		"| Retention under EVENTUAL | `Forever` |",
		fmt.Sprintf("| requests of one `WithIdempotencyMany` | %d |", txn.MaxMany),
		"| Retention under CACHE | " + human(redisfront.DefaultCacheRetention) + " |",
		fmt.Sprintf("| ResultLimit | %d MiB |", op.ResultLimit>>20),
		"| Lease | " + human(op.Lease) + " |",
		"| Takeover | " + string(op.Takeover) + " |",
		"| TokenLife | " + human(op.TokenLife) + " |",
		"| worker number, lease | " + human(ids.DefaultLease) + " |",
		"| worker number, margin | " + human(ids.DefaultMargin) + " |",
		fmt.Sprintf("| clock set back, waited for | %d ms |", ids.DefaultMaxBack/time.Millisecond),
		fmt.Sprintf("secrets of at least %d bytes", ids.MinSecretBytes),
		"| policies, read every | " + human(idempotency.DefaultPolicyInterval) + " |",
		"| policies, a read | " + human(idempotency.DefaultPolicyTimeout) + " |",
		"| executions without a record | " + human(compensator.DefaultBypassRetention) + " |",
		fmt.Sprintf("| a policy's Wait | 0 to %d min,", idempotency.MaxPolicyWait/time.Minute),
		fmt.Sprintf("in a millisecond, %d workers |", ids.MaxWorker+1),
		"| Codec | `" + txn.JSON{}.Name() + "` |",
		fmt.Sprintf("| MaxRetries | %d |", txn.DefaultMaxRetries),
		"| MaxWaiters | " + thousands(txn.DefaultMaxWaiters) + " |",
		"| CommitTimeout | " + human(txn.DefaultCommitTimeout) + " |",
		"| local front, records | " + thousands(localfront.DefaultMaxRecords) + " |",
		fmt.Sprintf("| local front, bytes | %d MiB |", localfront.DefaultMaxBytes>>20),
		"| local front, age | " + human(localfront.DefaultMaxAge) + " |",
		fmt.Sprintf("| Redis, a call | %d ms |", redisfront.DefaultTimeout/time.Millisecond),
		fmt.Sprintf("| Redis, largest result | %d KiB |", redisfront.DefaultResultLimit>>10),
		"| Redis, margin | " + human(redisfront.DefaultMargin) + " |",
		"| Redis, names begin with | `" + redisfront.DefaultPrefix + "` |",
		"| state in Redis alone | " + human(redisfront.DefaultCacheLife) + " |",
		"| copy of a state in Redis | " + human(redisfront.DefaultMirrorLife) + " |",
		fmt.Sprintf("| a machine's states | at most %d, of 1 to %d bytes |", idempotency.MaxStates, idempotency.MaxStateBytes),
		fmt.Sprintf("| a machine's name | 1 to %d bytes |", idempotency.MaxOperationBytes),
		fmt.Sprintf("| a transition's id | %d to %d bytes |", idempotency.MinKeyBytes, idempotency.MaxKeyBytes),
		fmt.Sprintf("| HTTP, request body | %d MiB |", idempotencyhttp.DefaultMaxBody>>20),
		fmt.Sprintf("| HTTP, response | %d MiB |", idempotencyhttp.DefaultMaxResponse>>20),
		fmt.Sprintf("at least %d min; `Forever`", idempotency.MinRetention/time.Minute),
		fmt.Sprintf("| tenant | 1 to %d bytes |", idempotency.MaxTenantBytes),
		fmt.Sprintf("| operation | 1 to %d bytes |", idempotency.MaxOperationBytes),
		fmt.Sprintf("| key | %d to %d bytes |", idempotency.MinKeyBytes, idempotency.MaxKeyBytes),
		fmt.Sprintf("| client | %d bytes |", idempotency.MaxClientBytes),
		fmt.Sprintf("| stored error text | %d bytes, cut |", idempotency.MaxErrorBytes),
	} {
		require.Contains(t, text, row)
	}
}

func TestReadme_GoCodeIsTheExample(t *testing.T) {
	t.Parallel()
	example := read(t, "txn/example_test.go")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "README.md"), -1)
	require.GreaterOrEqual(t, len(blocks), 2)
	for _, block := range blocks[:2] {
		for _, part := range strings.Split(strings.TrimSpace(block[1]), "\n\n") {
			require.Contains(t, example, part)
		}
	}
}

func TestPolicies_GoCodeIsTheExample(t *testing.T) {
	t.Parallel()
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "docs/policies.md"), -1)
	require.Len(t, blocks, 1)
	require.True(t, strings.Contains(read(t, "txn/example_policies_test.go"), blocks[0][1]), "not in the example: %s", blocks[0][1])
}

func TestHTTP_GoCodeIsTheExample(t *testing.T) {
	t.Parallel()
	examples := []string{"idempotencyhttp/example_test.go", "idempotencyhttp/idempotencyclient/example_test.go"}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "docs/http.md"), -1)
	require.Len(t, blocks, len(examples))
	for i, block := range blocks {
		require.True(t, strings.Contains(read(t, examples[i]), block[1]), "not in the example: %s", block[1])
	}
}

func TestMachine_GoCodeIsTheExamples(t *testing.T) {
	t.Parallel()
	examples := read(t, "idempotency/example_machine_test.go") + read(t, "redisfront/example_machine_test.go")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "docs/machine.md"), -1)
	require.Len(t, blocks, 5)
	for _, block := range blocks {
		require.True(t, strings.Contains(examples, block[1]), "not in an example: %s", block[1])
	}
}

func TestMessages_GoCodeIsTheExample(t *testing.T) {
	t.Parallel()
	indents := regexp.MustCompile(`(?m)^\t+`)
	example := indents.ReplaceAllString(read(t, "idempotencymsg/example_test.go"), "")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "docs/messages.md"), -1)
	require.Len(t, blocks, 2)
	for _, block := range blocks {
		require.True(t, strings.Contains(example, indents.ReplaceAllString(block[1], "")), "not in the example: %s", block[1])
	}
}

func TestDatabaseSQL_GoCodeIsTheExamples(t *testing.T) {
	t.Parallel()
	tests := read(t, "txnsql/example_test.go") + read(t, "txnsql/orms/gorm_test.go") + read(t, "txnsql/orms/sqlx_test.go") + read(t, "txnsql/orms/ent_test.go")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, "docs/database_sql.md"), -1)
	require.Len(t, blocks, 4)
	for _, block := range blocks {
		require.True(t, strings.Contains(tests, block[1]), "not in a test: %s", block[1])
	}
}

func TestLeases_FenceIsUsedAsInItsTest(t *testing.T) {
	t.Parallel()
	_, section, found := strings.Cut(read(t, "docs/leases.md"), "\n## Writes outside the transaction\n")
	require.True(t, found)
	blocks := regexp.MustCompile("(?s)```\\w+\n(.*?)```").FindAllStringSubmatch(section, -1)
	require.Len(t, blocks, 2)
	for _, block := range blocks {
		code := strings.TrimSuffix(strings.TrimSpace(block[1]), ";")
		require.True(t, strings.Contains(read(t, "txn/lease_fence_test.go"), code), "not in the test: %s", code)
	}
}

func TestLinks_LeadSomewhere(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#]+)[^)]*\)`)
	for _, name := range files(t, ".md") {
		for _, m := range link.FindAllStringSubmatch(read(t, name), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			_, err := os.Stat(filepath.Join("..", filepath.Dir(name), m[1]))
			require.NoError(t, err, "%s links to %s", name, m[1])
		}
	}
}

func TestSchemaVersion_OneNumber(t *testing.T) {
	t.Parallel()
	// txn must not import db, which brings goose.
	require.Equal(t, db.SchemaVersion, idempotency.SchemaVersion)
}
