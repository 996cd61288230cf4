// Package pgdump writes a database's schema as text that is the same on every PostgreSQL version we support.
package pgdump

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Schema dumps the schema objects of a database, normalised. The arguments go to pg_dump, for example
// --schema=idempotency.
func Schema(ctx context.Context, url string, args ...string) (string, error) {
	server, err := serverMajor(ctx, url)
	if err != nil {
		return "", err
	}
	program, err := find(ctx, server)
	if err != nil {
		return "", err
	}
	args = append([]string{"--schema-only", "--no-owner", "--no-privileges", "--dbname=" + url}, args...)
	var out, errout bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = &out, &errout
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run %s: %w: %s", program, err, strings.TrimSpace(errout.String()))
	}
	return normalise(out.String()), nil
}

func serverMajor(ctx context.Context, url string) (int, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return 0, fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	var number int
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::integer").Scan(&number); err != nil {
		return 0, fmt.Errorf("read server version: %w", err)
	}
	return number / 10000, nil
}

var programVersion = regexp.MustCompile(`^pg_dump \(PostgreSQL\) (\d+)`)

// find returns the oldest pg_dump that is not older than the server: an older one refuses.
func find(ctx context.Context, server int) (string, error) {
	var programs []string
	if path, err := exec.LookPath("pg_dump"); err == nil {
		programs = append(programs, path)
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin/pg_dump",            // Debian
		"/usr/pgsql-*/bin/pg_dump",                     // Red Hat
		"/opt/homebrew/opt/postgresql@*/bin/pg_dump",   // Homebrew on ARM
		"/usr/local/opt/postgresql@*/bin/pg_dump",      // Homebrew on Intel
		"/Applications/Postgres.app/*/*/*/bin/pg_dump", // Postgres.app
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return "", fmt.Errorf("look for pg_dump: %w", err)
		}
		programs = append(programs, found...)
	}
	best, bestMajor := "", 0
	for _, program := range programs {
		out, err := exec.CommandContext(ctx, program, "--version").Output()
		if err != nil {
			continue
		}
		match := programVersion.FindSubmatch(out)
		if match == nil {
			continue
		}
		major, err := strconv.Atoi(string(match[1]))
		if err == nil && major >= server && (best == "" || major < bestMajor) {
			best, bestMajor = program, major
		}
	}
	if best == "" {
		return "", fmt.Errorf("no pg_dump of version %d or newer found (looked at %q): install PostgreSQL's client programs",
			server, programs)
	}
	return best, nil
}

var (
	// The title of each object. It names the owner's placeholder and what the next line says again.
	title = regexp.MustCompile(`(?m)^--\n-- Name: .*\n--\n`)
	// What differs between versions, or only sets up the session that would load the dump.
	noise = regexp.MustCompile(`(?m)^(-- Dumped (from|by) .*|\\(un)?restrict .*|SET \w+ = .*;|SELECT pg_catalog\.set_config\(.*\);|` +
		`--\n-- PostgreSQL database dump( complete)?\n--)$`)
	view       = regexp.MustCompile(`(?ms)^CREATE VIEW .*?;$`)
	relation   = regexp.MustCompile(`(?:FROM|JOIN) \(*\w+\.\w+ (\w+)`)
	blankLines = regexp.MustCompile(`\n{3,}`)
)

func normalise(dump string) string {
	dump = strings.ReplaceAll(dump, "\r\n", "\n")
	dump = title.ReplaceAllString(dump, "")
	dump = noise.ReplaceAllString(dump, "")
	dump = view.ReplaceAllStringFunc(dump, unqualify)
	dump = blankLines.ReplaceAllString(dump, "\n\n")
	return strings.TrimSpace(dump) + "\n"
}

// unqualify writes the columns of a view over one relation without its alias, as PostgreSQL does from 16 on.
func unqualify(view string) string {
	relations := relation.FindAllStringSubmatch(view, -1)
	if len(relations) != 1 {
		return view
	}
	return regexp.MustCompile(`\b`+relations[0][1]+`\.`).ReplaceAllString(view, "")
}
