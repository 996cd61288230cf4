package devstack

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Names of our own: the common DATABASE_URL often points at something precious.
const (
	envDatabase = "PGONCE_DATABASE_URL"
	envRedis    = "PGONCE_REDIS_URL"
)

// useEnv takes the server somebody named. The database in the URL serves for CREATE DATABASE only.
func (s *Stack) useEnv(ctx context.Context, w wanted, given string) error {
	s.env, s.adminURL = true, given
	major, err := s.checkVersion(ctx, w)
	if err != nil {
		return fmt.Errorf("devstack: use %s: %w", envDatabase, err)
	}
	_, _ = fmt.Fprintf(s.out, "devstack: PostgreSQL: the server of %s (version %d)\n", envDatabase, major)
	s.sweepDatabases(ctx)
	return nil
}

// checkVersion asks a server whose program we did not see for its version.
func (s *Stack) checkVersion(ctx context.Context, w wanted) (major int, err error) {
	rows, err := s.admin(ctx, "SHOW server_version_num")
	if err != nil {
		return 0, err
	}
	number, err := strconv.Atoi(rows[0][0])
	if err != nil || !w.takes(number/10000) {
		return 0, fmt.Errorf("devstack: the server is version %s: %s is needed", rows[0][0], w.versions())
	}
	return number / 10000, nil
}

// withDatabase is the connection string with another database.
func withDatabase(conn, name string) (string, error) {
	var changed string
	if strings.HasPrefix(conn, "postgres://") || strings.HasPrefix(conn, "postgresql://") {
		u, err := url.Parse(conn)
		if err != nil {
			// Not the error itself: it would print the password.
			return "", fmt.Errorf("devstack: use %s: it is not a URL", envDatabase)
		}
		q := u.Query()
		q.Del("dbname")
		q.Del("database")
		u.Path, u.RawPath, u.RawQuery = "/"+name, "", q.Encode()
		changed = u.String()
	} else {
		changed = conn + " dbname=" + name // of two, the last one counts
	}
	// The guard's last word: whatever form the string had, it leads to the database we made and nowhere else.
	parsed, err := pgconn.ParseConfig(changed)
	if err != nil {
		return "", fmt.Errorf("devstack: use %s: %w", envDatabase, err)
	}
	if parsed.Database != name {
		return "", fmt.Errorf("%w: the connection string leads to %q instead of %q",
			ErrForeignDatabase, parsed.Database, name)
	}
	return changed, nil
}
