// Command withpg runs another program beside a migrated throw-away database, whose URL it finds in a variable.
//
//	go run ./internal/pgtest/withpg PGONCE_SQLC_URL bin/sqlc vet
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/devstack"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: withpg VARIABLE PROGRAM [ARGUMENT...]")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1], os.Args[2], os.Args[3:]...)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpg:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, variable, program string, args ...string) (err error) {
	stack, err := devstack.Start(ctx, &devstack.Config{Settings: map[string]string{"fsync": "off"}, Out: os.Stderr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stack.Stop()) }()
	database, err := stack.CreateDatabase(ctx)
	if err != nil {
		return err
	}
	conn, err := pgconn.Connect(ctx, database.URL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	_, err = conn.Exec(ctx, db.InstallSQL()).ReadAll()
	if err := errors.Join(err, conn.Close(ctx)); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), variable+"="+database.URL)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run %s: %w", program, err)
	}
	return nil
}
