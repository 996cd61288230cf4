package main

// edgePlants are in clients, edges, and the two guards.
var edgePlants = []plant{
	{
		name: "an HTTP client with another key for every try",
		why:  "an order whose answer was lost is made again",
		edits: []edit{{
			file: "idempotencyhttp/idempotencyclient/transport.go",
			old:  `[]string{c.key}`,
			new:  `[]string{c.key + string(rune('0'+c.attempts))}`,
		}},
		caught: suite{pkg: "./idempotencyhttp/idempotencyclient", run: "^(TestTransport_AnswersLostAfterCommitAreReplayed|TestTransport_SurvivesARestartOfTheService)$"},
	},
	{
		name: "an HTTP client that comes back when it likes",
		why:  "whoever waits for a running request hammers the service",
		edits: []edit{{
			file: "idempotencyhttp/idempotencyclient/transport.go",
			old:  `pause = max(pause, c.pause)`,
			new:  `pause = max(pause, 0*c.pause)`,
		}},
		caught: suite{pkg: "./idempotencyhttp/idempotencyclient", run: "^TestCase_M13_AClientWaitsAsLongAsTheServiceSays$"},
	},
	{
		name: "an HTTP client that takes every refusal for a bad day",
		why:  "what is final is sent again and again",
		edits: []edit{{
			file: "idempotencyhttp/idempotencyclient/verdict.go",
			old:  `return slices.Contains(t.config.Statuses, p.Status)`,
			new:  `return len(slices.Clone(t.config.Statuses)) >= 0`,
		}},
		caught: suite{pkg: "./idempotencyhttp/idempotencyclient", run: "^TestTransport_OtherAnswers$"},
	},
	{
		name: "a tracer that takes the library's work for the function's",
		why:  "with Refuse, a call of another runner inside a function fails",
		edits: []edit{{
			file: "txn/tracer.go",
			old:  `silent == innermost {`,
			new:  `silent == innermost && false {`,
		}},
		caught: suite{pkg: "./txn", run: "^TestTracer_NoFalseReports$"},
	},
	{
		name: "a tracer that names our own code as the place",
		why:  "everything that goes past a transaction through database/sql is one place, which the log tells once",
		edits: []edit{{
			file: "txn/tracer.go",
			old:  ` "github.com/pgonce/pgonce/txnsql.",`,
			new:  ``,
		}},
		caught: suite{pkg: "./txnsql", run: "^TestTracer_SQLReportsWhatGoesPast$"},
	},
	{
		name: "a Connect answer with the headers of a run that was rolled back",
		why:  "the client is told where to find an order that was never made",
		edits: []edit{{
			file: "idempotencygrpc/idempotencyconnect/server.go",
			old:  "\t\t\tmetadata.restore()\n\t\t\tif latest",
			new:  "\t\t\tif latest",
		}},
		caught: suite{pkg: "./idempotencygrpc/idempotencyconnect", run: "^TestWire_HeadersOfTheCallAreThoseOfTheRunThatCounts$"},
	},
	{
		name: "a gRPC failure that cannot be recorded",
		why:  "what is refused for good is tried again by every retry, and answered by internal",
		edits: []edit{{
			file: "idempotencygrpc/internal/unary/reply.go",
			old:  `if utf8.ValidString(s.Message()) {`,
			new:  `if utf8.ValidString(s.Message()) || strings.Contains(s.Message(), "") {`,
		}},
		caught: suite{pkg: "./idempotencygrpc/idempotencyconnect", run: "^TestWire_TextOfAnErrorMayBeAnything$"},
	},
}
