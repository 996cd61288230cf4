package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
)

func (a *app) newMigrate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create, upgrade, examine or undo the schema idempotency",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		&cobra.Command{
			Use: "up", Short: "Bring the schema to this program's version; many may run it at once", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.withPool(cmd.Context(), a.migrateUp) },
		},
		a.newMigrateDown(),
		&cobra.Command{
			Use: "status", Short: "Say which migrations are applied, and which are not", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.withPool(cmd.Context(), a.migrateStatus) },
		},
		&cobra.Command{
			Use: "validate", Short: "Compare the schema with what the migrations leave; status 1 if they differ", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.withPool(cmd.Context(), a.migrateValidate) },
		},
		&cobra.Command{
			Use: "sql", Short: "Print all migrations as one SQL statement, for psql and for poolers", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				if a.json {
					return a.printJSON(map[string]any{"version": db.SchemaVersion, "sql": db.InstallSQL()})
				}
				a.printf("%s", db.InstallSQL())
				return nil
			},
		},
	)
	return cmd
}

// migrationNames are the files without their ending, by version.
func migrationNames() (map[int]string, error) {
	files, err := fs.Glob(db.Migrations(), "*.sql")
	names := make(map[int]string, len(files))
	for _, file := range files {
		var version int
		if _, err := fmt.Sscanf(file, "%05d_", &version); err != nil {
			return nil, fmt.Errorf("migration %s: %w", file, err)
		}
		names[version] = strings.TrimSuffix(file, ".sql")
	}
	return names, err
}

func (a *app) migrateUp(ctx context.Context, pool *pgxpool.Pool) error {
	before, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return err
	}
	if err := db.Migrate(ctx, pool); err != nil {
		return err
	}
	after, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return err
	}
	return a.migrated(before.Version, after.Version)
}

func (a *app) migrated(before, after int) error {
	if a.json {
		return a.printJSON(map[string]int{"before": before, "after": after})
	}
	if before == after {
		a.printf("nothing to do: the schema has version %d\n", after)
		return nil
	}
	a.printf("the schema had version %d and has version %d\n", before, after)
	return nil
}

func (a *app) newMigrateDown() *cobra.Command {
	var to int
	var yes, lose bool
	cmd := &cobra.Command{
		Use:   "down --to VERSION",
		Short: "Undo migrations, with what is in the tables that they created",
		Long: "Undo the migrations above --to. What they created is dropped with what is in it.\n\n" +
			"Below 1 every record is gone, and a late retry of any key runs its operation again; with records in the table --lose-records\n" +
			"must say so. Stop the services first: their release needs the version it was made for.",
		Example: "  pgonce migrate down --to 3",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if to < 0 {
				return usagef("--to must not be negative")
			}
			return a.withPool(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				return a.migrateDown(ctx, pool, to, yes, lose)
			})
		},
	}
	cmd.Flags().IntVar(&to, "to", 0, "the version to go back to; 0 drops the schema (required)")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&lose, "lose-records", false, "drop the records too, with --to 0")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

func (a *app) migrateDown(ctx context.Context, pool *pgxpool.Pool, to int, yes, lose bool) error {
	before, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return err
	}
	if to > before.Version {
		return usagef("--to must be at most %d, the version that the schema has", before.Version)
	}
	if to == before.Version {
		return a.migrated(to, to)
	}
	names, err := migrationNames()
	if err != nil {
		return err
	}
	var undone []string
	for version := before.Version; version > to; version-- {
		undone = append(undone, names[version])
	}
	if to == 0 && !lose {
		records, err := anyRecords(ctx, pool)
		if err != nil {
			return err
		}
		if records {
			return errors.New("idempotency.records is not empty: every record would be lost, and a late retry would run again; " +
				"say --lose-records if that is meant")
		}
	}
	question := fmt.Sprintf("Database %s: undo %s, with what is in the tables they created?",
		pool.Config().ConnConfig.Database, strings.Join(undone, ", "))
	if err := a.confirm(yes, question); err != nil {
		return err
	}
	if err := db.Down(ctx, pool, to); err != nil {
		return err
	}
	return a.migrated(before.Version, to)
}

type migrationView struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	Applied bool   `json:"applied"`
	Listed  bool   `json:"listed"` // in goose's list
}

func (a *app) migrateStatus(ctx context.Context, pool *pgxpool.Pool) error {
	s, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return err
	}
	names, err := migrationNames()
	if err != nil {
		return err
	}
	views := make([]migrationView, 0, len(names))
	for version := 1; version <= max(db.SchemaVersion, s.Version); version++ {
		name, known := names[version]
		if !known {
			name = "of a newer release"
		}
		views = append(views, migrationView{version, name, version <= s.Version, slices.Contains(s.Listed, version)})
	}
	if a.json {
		return a.printJSON(map[string]any{
			"version": s.Version, "wanted": db.SchemaVersion, "list_agrees": s.Agrees(), "pooled": s.Pooled, "migrations": views,
		})
	}
	rows := [][]string{{"VERSION", "MIGRATION", "STATE"}}
	for _, v := range views {
		rows = append(rows, []string{fmt.Sprint(v.Version), v.Name, map[bool]string{true: "applied", false: "pending"}[v.Applied]})
	}
	table(a.out, rows)
	a.printf("\nThe schema has version %d, this program needs %d.\n", s.Version, db.SchemaVersion)
	if !s.Agrees() {
		a.printf("%s lists %v: %s\n", db.VersionTable, s.Listed, listFix)
	}
	return nil
}

// The installation goes by the schema, and writes the list where there is none.
const listFix = "goose's list is not that of the schema: DROP TABLE " + db.VersionTable + "; then pgonce migrate sql | psql writes it anew"

func (a *app) migrateValidate(ctx context.Context, pool *pgxpool.Pool) error {
	problems, notes, err := validate(ctx, pool)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(map[string]any{"valid": len(problems) == 0, "problems": problems, "notes": notes}); err != nil {
			return err
		}
	} else {
		for _, note := range notes {
			a.printf("note: %s\n", printable(note))
		}
		for _, problem := range problems {
			a.printf("problem: %s\n", printable(problem))
		}
		if len(problems) == 0 {
			a.printf("the schema is that of version %d\n", db.SchemaVersion)
		}
	}
	if len(problems) > 0 {
		return errSaid
	}
	return nil
}

// validate finds what is not as the migrations leave it; notes are what others have added.
func validate(ctx context.Context, pool *pgxpool.Pool) (problems, notes []string, err error) {
	problems, notes = []string{}, []string{}
	s, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case s.Version == 0:
		return append(problems, "there is no schema idempotency: run pgonce migrate up"), notes, nil
	case s.Version < db.SchemaVersion:
		return append(problems, fmt.Sprintf("the schema has version %d, this program needs %d: run pgonce migrate up",
			s.Version, db.SchemaVersion)), notes, nil
	case s.Version > db.SchemaVersion:
		return problems, append(notes, fmt.Sprintf("the schema has version %d and this program knows %d: not compared",
			s.Version, db.SchemaVersion)), nil
	}
	if !s.Agrees() {
		problems = append(problems, fmt.Sprintf("%s lists %v: %s", db.VersionTable, s.Listed, listFix))
	}
	differences, err := db.Validate(ctx, pool)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range differences {
		if d.Want == "" {
			notes = append(notes, d.String())
		} else {
			problems = append(problems, d.String())
		}
	}
	return problems, notes, nil
}

// anyRecords reads at most one.
func anyRecords(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	lines, _, err := newStore().List(ctx, pool, &idempotency.ListFilter{}, 1)
	return len(lines) > 0, err
}
