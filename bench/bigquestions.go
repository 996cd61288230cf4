package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/audittest"
)

// answered is a question of the guides and what its answer took.
type answered struct {
	Title   string  `json:"title"`
	Guide   string  `json:"guide"`
	SetupS  float64 `json:"setup_seconds,omitempty"` // building an index, for example
	FirstMS float64 `json:"first_ms"`
	AgainMS float64 `json:"again_ms"` // median of three more
	Pages   int64   `json:"pages"`    // of 8 KiB, read or found in shared_buffers
	Carrier string  `json:"carrier"`
	ReadAll bool    `json:"reads_the_table"`
}

// The guides, as seen from this folder, where the command is run.
const auditGuide, remedyGuide = "../docs/audit.md", "../docs/big_tables.md"

// askQuestions asks everything in the guides, after adding the records that the guides ask about.
func askQuestions(ctx context.Context, s *shop, say func(string, ...any)) (all []answered, err error) {
	fixture, err := os.ReadFile("../db/testdata/audit.sql")
	if err != nil {
		return nil, fmt.Errorf("run it in the folder bench: %w", err)
	}
	err = s.with(ctx, func(conn *pgx.Conn) error {
		// The guides have a table of orders of their own.
		for _, sql := range []string{"DROP TABLE orders", string(fixture), "VACUUM ANALYZE idempotency.records"} {
			if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
				return err
			}
		}
		for _, guide := range []string{auditGuide, remedyGuide} {
			text, err := os.ReadFile(guide)
			if err != nil {
				return err
			}
			for _, q := range audittest.Questions(string(text)) {
				say("question %s", q.Title)
				one, err := ask(ctx, conn, q)
				if err != nil {
					return fmt.Errorf("%s: %w", q.Title, err)
				}
				one.Guide = guide
				all = append(all, one)
			}
		}
		return nil
	})
	return all, err
}

func ask(ctx context.Context, conn *pgx.Conn, q audittest.Question) (answered, error) {
	one := answered{Title: q.Title}
	begin := time.Now()
	for _, sql := range q.Setup {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return one, err
		}
		one.SetupS = time.Since(begin).Seconds()
	}
	var again []float64
	for i := range 4 {
		plan, err := audittest.Explain(ctx, conn, q.SQL, true)
		if err != nil {
			return one, err
		}
		if i == 0 {
			one.FirstMS = plan.ExecutionMS
			one.Pages = plan.Root.Hit + plan.Root.Read
			one.Carrier, one.ReadAll = plan.Carrier().String(), plan.ReadsAll("records")
			continue
		}
		again = append(again, plan.ExecutionMS)
	}
	one.AgainMS = median(again)
	return one, nil
}
