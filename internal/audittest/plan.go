package audittest

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Node is one node of a plan, as EXPLAIN (FORMAT JSON) shows it.
type Node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"` // of one loop, as the time is
	TotalMS  float64 `json:"Actual Total Time"`
	Loops    float64 `json:"Actual Loops"`
	Hit      int64   `json:"Shared Hit Blocks"` // with its children
	Read     int64   `json:"Shared Read Blocks"`
	Plans    []Node  `json:"Plans"`
}

// Plan is the plan of a question. Its times are 0 if it was not run.
type Plan struct {
	Root        Node    `json:"Plan"`
	PlanningMS  float64 `json:"Planning Time"`
	ExecutionMS float64 `json:"Execution Time"`
}

// querier is a connection, a pool or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Explain returns the plan of a query; analyze runs it.
func Explain(ctx context.Context, q querier, sql string, analyze bool, args ...any) (Plan, error) {
	options := "FORMAT JSON"
	if analyze {
		options += ", ANALYZE, BUFFERS"
	}
	var text string
	// Unprepared: no plan of an earlier question is used again.
	if err := q.QueryRow(ctx, "EXPLAIN ("+options+") "+sql, append([]any{pgx.QueryExecModeExec}, args...)...).Scan(&text); err != nil {
		return Plan{}, fmt.Errorf("audittest: explain: %w", err)
	}
	var plans []Plan
	if err := json.Unmarshal([]byte(text), &plans); err != nil || len(plans) != 1 {
		return Plan{}, fmt.Errorf("audittest: explain: %d plans (%w)", len(plans), err)
	}
	return plans[0], nil
}

// Walk visits all nodes, parents first.
func (n *Node) Walk(visit func(*Node)) {
	visit(n)
	for i := range n.Plans {
		n.Plans[i].Walk(visit)
	}
}

// ReadsAll reports whether the plan has a node that reads this table from end to end.
func (p *Plan) ReadsAll(table string) (found bool) {
	p.Root.Walk(func(n *Node) { found = found || n.Relation == table && n.Type == "Seq Scan" })
	return found
}

// Carrier is the node in which most of the time was spent, its children not counted.
func (p *Plan) Carrier() *Node {
	carrier, most := &p.Root, -1.0
	p.Root.Walk(func(n *Node) {
		if n.Type == "CTE Scan" || n.Type == "WorkTable Scan" {
			return // their time is that of the plan behind them
		}
		own := n.TotalMS * n.Loops
		for i := range n.Plans {
			own -= n.Plans[i].TotalMS * n.Plans[i].Loops
		}
		if own > most {
			carrier, most = n, own
		}
	})
	return carrier
}

// String names the node as people do: "Seq Scan on records", "Index Scan using records_pkey".
func (n *Node) String() string {
	switch {
	case n.Index != "":
		return n.Type + " using " + n.Index
	case n.Relation != "":
		return n.Type + " on " + n.Relation
	}
	return n.Type
}
