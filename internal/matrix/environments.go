package main

// environment is one row.
type environment struct {
	name string
	pkg  string
	tags string // of the build: tests that need PgBouncer have the tag pooler
	env  string // pgtest.EnvironmentVariable
	tz   string // of the process
	// only restricts the row to these tests, "" is the whole suite.
	only   string
	notRun []exclusion
}

// exclusion is a test, or TEST/EXPRESSION for subtests, whose subject does not exist in an environment.
type exclusion struct{ test, why string }

var behindPooler = []exclusion{
	{"TestCall_EveryQueryModeAndIsolationLevel/cache_statement", "named statements need a session; TestCase_P11_NamedStatements shows how they fail"},
	{"TestFronts_WithoutAnEpochCallsGoOn/cache_statement", "named statements need a session"},
	{"TestTx_EveryMethod/Prepare", "a name that the function prepares may be another client's already"},
	{"ExampleWithIdempotency", "its pool is the README's, which connects directly"},
	{"TestCase_P05_CommitThatAnswersRollbackIsNoSuccess", "it puts another statement behind a name of ours, and there are none"},
	{"TestMisuse_JoinedDeallocateAll", "there are no named statements to be lost"},
	{"TestMisuse_FunctionsNamedLikePostgresOwn", "the pooler does not hand on the client's search_path"},
	{"TestCall_MigrationUnderARunningProgramIsNoticed", "PostgreSQL's sessions are the pooler's: after a migration that changes types it must renew them (RECONNECT)"},
	germanTimes,
}

// unnamed is what needs statements with names.
var unnamed = []exclusion{
	{"TestCase_P05_CommitThatAnswersRollbackIsNoSuccess", "it puts another statement behind a name of ours, and there are none"},
	{"TestMisuse_JoinedDeallocateAll", "there are no named statements to be lost"},
	{"TestCall_MigrationUnderARunningProgramIsNoticed", "without named statements the session does not say that it is older than the migration: calls fail with 42804 until the connection is renewed"},
	germanTimes,
}

var germanTimes = exclusion{
	"TestMisuse_LeftBehind/hostile_time_zone/WithIdempotencyTx",
	"in exec mode pgx reads times as text, in no other DateStyle than ISO: the call ends with an error",
}

// restarting are the tests whose servers die and move. The row's pooler knows one server, and its users' passwords.
var restarting = func() (all []exclusion) {
	for _, test := range []string{
		"TestFault_SynchronousFailoverLosesNothingAcknowledged", "TestFault_AsynchronousFailoverLosesRecordsWithTheirOrders",
		"TestFault_KilledServerLosesNothingAcknowledged", "TestFault_ServerDeadAtCommit", "TestFault_CommitWaitsForMissingStandby",
		"TestFault_BrokenWaitForStandbyIsNoSuccess", "TestFault_StandbyIsRefused", "TestFault_CompensatorsCommitWaitsForMissingStandby",
	} {
		all = append(all, exclusion{test, "its servers are its own, and the pooler does not know them"})
	}
	return all
}()

// core are the tests in which calls meet one another, PostgreSQL and time.
const core = "^(TestCase_[DPRS]|TestCommit_|TestJoined_|TestWait_|TestOneEffectPerKey_ManyGoroutines)"

// The pooler rows come first: they are the ones most likely to find something. Choices that do not touch one another share
// a row, so that a dozen rows cover them all; the usual environment itself is `make test`.
var environments = []environment{
	{name: "pooler-exec", pkg: "./txn", tags: "pooler", env: "pooler=pgbouncer mode=exec", notRun: behindPooler},
	{name: "pooler-describe", pkg: "./txn", tags: "pooler", env: "pooler=pgbouncer mode=cache_describe conns=2", notRun: behindPooler},
	{name: "pooler-migrations", pkg: "./db", tags: "pooler", only: "^TestCase_D0[123]_"},
	{name: "pooler-database-sql", pkg: "./txnsql", tags: "pooler", only: "^TestConformance_BehindAPooler"},
	{name: "pooler-faults", pkg: "./internal/faultsuite", env: "pooler=pgbouncer mode=exec", notRun: append([]exclusion{
		{"TestFault_LostCommitIsResolved/.*cache_statement", "named statements need a session"},
	}, restarting...)},
	{name: "conns-1", pkg: "./txn", env: "conns=1"},
	{name: "conns-2-exec-rr", pkg: "./txn", env: "conns=2 mode=exec isolation=repeatable_read", notRun: unnamed},
	{name: "conns-4-describe-exec", pkg: "./txn", env: "conns=4 mode=describe_exec", only: core, notRun: unnamed[:1]},
	{name: "serializable", pkg: "./txn", env: "isolation=serializable"},
	{name: "zone-describe", pkg: "./txn", env: "timezone=Asia/Kathmandu mode=cache_describe", tz: "Asia/Kathmandu", only: core, notRun: unnamed[:1]},
	{name: "clock-ahead", pkg: "./txn", env: "clock=+1h"},
	{name: "clock-behind", pkg: "./txn", env: "clock=-1h", tz: "America/St_Johns", only: core},
}
