package main

import "slices"

// plants are the bugs, the worst first. An old text is changed together with the code that it is copied from; `go test
// ./internal/planted` says which one does not apply any more.
var plants = slices.Concat(libraryPlants, edgePlants)

// libraryPlants are in what every program uses.
var libraryPlants = []plant{
	{
		name: "COMMIT on the request's context",
		why:  "a client that hangs up breaks the connection at COMMIT: what committed is told as failed, and done again",
		edits: []edit{{
			file: "txn/attempt.go",
			old:  `context.WithTimeout(context.WithoutCancel(ctx), a.call.runner.config.CommitTimeout)`,
			new:  `context.WithTimeout(ctx, a.call.runner.config.CommitTimeout)`,
		}},
		caught: suite{pkg: "./txn", run: "^(TestCommit_IsNotCancelledWithTheRequest|TestCase_M02_ClientThatHangsUpBeforeCommitDoesNotStopIt)$"},
	},
	{
		name: "retry after a lost COMMIT without looking",
		why:  "the caller is told that somebody else's call did its work, or runs again what has committed",
		edits: []edit{
			{
				file: "txn/tries.go",
				old:  `found, err := c.resolve(ctx, s.err)`,
				new:  `found, err := step{kind: kindAgain}, error(nil)`,
			},
			{
				file: "txn/attempt.go",
				old:  `a.acquired.Verdict(c.req.Fingerprint, c.tokens...)`,
				new:  `a.acquired.Verdict(c.req.Fingerprint)`,
			},
		},
		caught: suite{pkg: "./internal/faultsuite", run: "^TestFault_LostCommitIsResolved$"},
	},
	{
		name: "no unique key",
		why:  "whoever does not know the lock (another program, a failover, a lost lock) makes a second order",
		edits: []edit{{
			file: "db/install.sql",
			old:  `CONSTRAINT records_pkey PRIMARY KEY (key, tenant, operation)`,
			new:  `CONSTRAINT records_pkey CHECK (true)`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_P07_RecordOfAnotherWriterIsReplayed$"},
	},
	{
		name: "outcome shared before COMMIT has answered",
		why:  "waiting callers are told of an order that COMMIT then refuses",
		edits: []edit{
			{
				file: "txn/call.go",
				old: `		c.dropMark(ctx)
`,
				new: `		c.dropMark(ctx)
		if c.published != nil {
			out.record, committed = *c.published, true
		}
`,
			},
			{
				file: "txn/call.go",
				old:  "\tending  verdictKind\n",
				new:  "\tending  verdictKind\n\tpublished *idempotency.Record\n",
			},
			{
				file: "txn/attempt.go",
				old:  "record, err = a.complete(ctx, conn, done)",
				new: `c.published = &idempotency.Record{
		Key: c.req.Key, State: done.State, Fingerprint: c.req.Fingerprint, AttemptToken: done.AttemptToken,
		ResultType: done.ResultType, Result: done.Result, ErrorCode: done.ErrorCode, ErrorMessage: done.ErrorMessage,
	}
	record, err = a.complete(ctx, conn, done)`,
			},
		},
		caught: suite{pkg: "./txn", run: "^TestWait_LeaderWhoseCommitIsRefusedSharesNothing$"},
	},
	{
		name: "completion in any transaction",
		why:  "a function that sends COMMIT and BEGIN has its record in another commit than its rows",
		edits: []edit{{
			file: "internal/dbsqlc/records.sql.go",
			old: `the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN pg_catalog.now() = $4::timestamptz THEN`,
			new: `the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN $4::timestamptz IS NOT NULL THEN`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_P05_TransactionEndedByTheFunctionNeverRunsAgain$"},
	},
	{
		name: "no lock before the read",
		why:  "every duplicate runs the function, and only the last moment tells it that it was in vain",
		edits: []edit{{
			file: "internal/dbsqlc/records.sql.go",
			old:  "SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock($1::bigint) THEN pg_catalog.nextval('idempotency.fence') END::bigint AS fence,\n       -- The start",
			new:  "SELECT CASE WHEN $1::bigint IS NOT NULL THEN pg_catalog.nextval('idempotency.fence') END::bigint AS fence,\n       -- The start",
		}},
		caught: suite{pkg: "./txn", run: "^(TestCase_R01_SecondNodeDoesNotRunWhileTheFirstDoes|TestCase_R08_CallsDuringTheRunAreToldInProgressThenReplay)$"},
	},
	{
		name: "COMMIT's tag not compared",
		why:  "COMMIT that answers ROLLBACK is told as success, and nothing is there",
		edits: []edit{{
			file: "idempotency/complete.go",
			old:  `if tag.String() != "COMMIT" {`,
			new:  `if tag.String() == "" {`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_P05_CommitThatAnswersRollbackIsNoSuccess$"},
	},
	{
		name: "no tenant in the lock",
		why:  "two tenants with one key hold each other up",
		edits: []edit{{
			file: "idempotency/lockid.go",
			old:  `[...]string{k.tenant, k.operation, k.value}`,
			new:  `[...]string{k.operation, k.value}`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_H06_TenantsNeverSeeOrBlockEachOther$"},
	},
	{
		name: "no tenant in the read",
		why:  "one tenant gets another's answer",
		edits: []edit{{
			file: "internal/dbsqlc/records.sql.go",
			old:  "WHERE tenant = $1 AND operation = $2 AND key = $3\n`",
			new:  "WHERE $1::text <> '' AND operation = $2 AND key = $3\n`",
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_H06_TenantsNeverSeeOrBlockEachOther$"},
	},
	{
		name: "cancel request after COMMIT",
		why:  "PostgreSQL stops waiting for its synchronous standby, and a failover loses what was acknowledged",
		edits: []edit{{
			file: "internal/pgguard/pgguard.go",
			old:  `if g.commitSent.Load() {`,
			new:  `if g == nil {`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCommit_NoCancelRequestOnceSent$"},
	},
	{
		name: "Final recorded without a rollback",
		why:  "the order is there, and everybody is told that it failed",
		edits: []edit{{
			file: "txn/attempt.go",
			old:  "same, rollbackErr := c.runner.store.RollbackOf(ctx, conn, a.acquired)",
			new: `if c.final = finalFailure(err, result); c.final != nil {
		return a.failure(c.final), step{}
	}
	same, rollbackErr := c.runner.store.RollbackOf(ctx, conn, a.acquired)`,
		}},
		caught: suite{pkg: "./txn", run: "^TestWithIdempotency_FinalIsRecordedAndReplayed$"},
	},
	{
		name: "Final in the caller's transaction without undo",
		why:  "the same, where the caller commits: its rows beside a failure",
		edits: []edit{{
			file: "txn/joined.go",
			old:  `undoErr := undo(ctx, tx)`,
			new:  `undoErr := error(nil)`,
		}},
		caught: suite{pkg: "./txn", run: "^TestJoined_FinalLastsIfTheCallerCommits$"},
	},
	{
		name: "expired record replayed",
		why:  "a key used again after its retention gets an old answer, and its order is never placed",
		edits: []edit{{
			file: "idempotency/state.go",
			old:  `if r.Expired || r.Retryable {`,
			new:  `if r.Retryable {`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_S15_RetentionEndsOneGenerationAndBeginsAnother$"},
	},
	{
		name: "other payload replayed",
		why:  "a key that a client uses twice answers another request with the first one's outcome",
		edits: []edit{{
			file: "idempotency/state.go",
			old:  `case fp.Matches(r.Fingerprint):`,
			new:  `case fp.Matches(r.Fingerprint) || r.Fingerprint.Known():`,
		}},
		caught: suite{pkg: "./txn", run: "^(TestCase_F08_KeyBelongsToItsOperationAndPayload|TestWithIdempotency_OtherPayloadIsMismatch)$"},
	},
	{
		name: "error after a lost COMMIT told as definite",
		why:  "the first COMMIT may still arrive: the client takes a new key, and there are two orders",
		edits: []edit{{
			file: "txn/tries.go",
			old:  "\tif !c.unknown.running() {\n\t\treturn s\n\t}\n",
			new:  "\tif !c.unknown.running() || s.kind == kindFailed {\n\t\treturn s\n\t}\n",
		}},
		caught: suite{pkg: "./txn", run: "^TestCommit_FunctionErrorAfterUnknownIsUnknown$"},
	},
	{
		name: "commit less durable than acknowledged",
		why:  "a function or server with synchronous_commit off loses acknowledged orders in a crash",
		edits: []edit{{
			file: "idempotency/complete.go",
			old:  `params := s.params(c, true)`,
			new:  `params := s.params(c, false)`,
		}},
		caught: suite{pkg: "./txn", run: "^TestCase_D8_FunctionCannotMakeItsCommitLessDurable$"},
	},
	{
		name: "functions found by search_path",
		why:  "a schema with a now() of its own, as tests have to freeze time, decides whether an order commits",
		edits: []edit{{
			file: "internal/dbsqlc/records.sql.go",
			old: `the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN pg_catalog.now() = $4`,
			new: `the function has sent COMMIT or ROLLBACK itself.
       CASE WHEN now() = $4`,
		}},
		caught: suite{pkg: "./txn", run: "^TestMisuse_FunctionsNamedLikePostgresOwn$"},
	},
	{
		name: "own COMMIT recorded with the lock only",
		why:  "a duplicate that gets the key behind a function's own COMMIT places the order a second time",
		edits: []edit{{
			file: "txn/attempt.go",
			old:  `if c.endedFence == 0 {`,
			new:  `if c.endedFence >= 0 {`,
		}},
		caught: suite{pkg: "./txn", run: "^(TestMisuse_DuplicateBetweenOwnCommitAndItsRecord|TestMisuse_PrepareTransaction)$"},
	},
	{
		name: "ROLLBACK on the request's context",
		why:  "every client that hangs up costs a connection, and its retry waits until the server has noticed",
		edits: []edit{{
			file: "idempotency/store.go",
			old:  "ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)\n\tdefer cancel()\n\tresults, err",
			new:  "ctx, cancel := context.WithTimeout(ctx, rollbackTimeout)\n\tdefer cancel()\n\tresults, err",
		}},
		caught: suite{pkg: "./internal/faultsuite", run: "^TestCase_P13_CancelledInAQuery$"},
	},
	{
		name: "half an answer taken for a failed COMMIT",
		why:  "the record's answer came, COMMIT's did not: the client is told that its order failed, and it is there",
		edits: []edit{{
			file: "idempotency/complete.go",
			old:  "\tcase err != nil && !definite(err):\n",
			new:  "\tcase err != nil && !definite(err) && errors.As(err, new(*pgconn.PgError)):\n",
		}},
		caught: suite{pkg: "./internal/faultsuite", run: "^TestFault_LostCommitIsResolved$/^cut_in_reply"},
		// Without the long ones, which break no connection.
		missed: suite{pkg: "./txn", run: everyTest, skip: "^Test(OneEffectPerKey|StateMachine|Case_P06)_"},
	},
	{
		name: "what a front keeps outlives a failover",
		why:  "an order that the failover lost is told as done, and never placed",
		edits: []edit{{
			file: "localfront/front.go",
			old:  ` || e.Epoch != ask.Epoch {`,
			new:  ` {`,
		}},
		caught: suite{pkg: "./internal/frontsuite", run: "^TestEpoch_NothingOfBeforeARestoreIsBelieved$"},
	},
	{
		name: "a front gives another payload's answer",
		why:  "a client that uses a key twice is told that its second order is placed",
		edits: []edit{{
			file: "localfront/front.go",
			old:  `v != idempotency.VerdictReplay {`,
			new:  `v == idempotency.VerdictRun {`,
		}},
		caught: suite{pkg: "./localfront", run: "^TestCase_K06_"},
	},
	{
		name: "an older outcome overwrites a newer one in Redis",
		why:  "a record that arrives late brings back the answer of the key's life before",
		edits: []edit{{
			file: "redisfront/lua/publish.lua",
			old:  `there[2] <= ARGV[2]`,
			new:  `true`,
		}},
		caught: suite{pkg: "./redisfront", run: "^TestFront_EpochAndFence$"},
	},
	{
		name: "whoever comes ends the mark",
		why:  "duplicates of a running order all go on to PostgreSQL",
		edits: []edit{{
			file: "redisfront/lua/end.lua",
			old:  `if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then`,
			new:  `if held then`,
		}},
		caught: suite{pkg: "./redisfront", run: "^(TestFront_OnlyItsOwnMark|TestCase_L07_ASlowOwnerLeavesTheNextOnesMark)$"},
	},
	{
		name: "a mark taken for a record",
		why:  "a stranger with the key and another payload makes the rightful retry a mismatch: it orders once more, with a new key",
		edits: []edit{{
			file: "txn/fronts.go",
			old:  ` && !mismatch.CreatedAt.IsZero()`,
			new:  ``,
		}},
		caught: suite{pkg: "./internal/frontsuite", run: "^TestFronts_ARivalThatAsksFirstDoesNotMakeTheRightfulRetryAMismatch$"},
	},
	{
		name: "an expired token is good",
		why:  "what was done with a token is forgotten, and the token does it once more",
		edits: []edit{{
			file: "idempotency/state.go",
			old:  `a.RequireIssued && (!a.Found || a.Record.Expired)`,
			new:  `a.RequireIssued && !a.Found`,
		}},
		caught: suite{pkg: "./txn", run: "^TestRequireIssued_RefusesWhatWasNotIssued$"},
	},
	{
		name: "a signature for any tenant",
		why:  "whoever has one token asks PostgreSQL about it for every tenant there is",
		edits: []edit{{
			file: "ids/token.go",
			old:  `key.ID, tenant, operation, body`,
			new:  `key.ID, operation, body`,
		}},
		caught: suite{pkg: "./ids", run: "^TestTokens_WhatWasNotIssuedIsRefused$"},
	},
	{
		name: "a worker number without its mark",
		why:  "a process that was stopped and the one that has its number since make the same ids",
		edits: []edit{{
			file: "ids/worker.go",
			old:  `lease.IssuedBefore.UnixMilli(), lease`,
			new:  `0, lease`,
		}},
		caught: suite{pkg: "./ids", run: "^(TestWorker_StoppedOwnerNeverRepeatsItsSuccessor|TestWorker_SuccessorWithASlowerClock)$"},
	},
	{
		name: "a batch that waits for its keys",
		why:  "two batches with the same keys in opposite orders deadlock",
		edits: []edit{
			{
				file: "internal/dbsqlc/records.sql.go",
				old:  `CASE WHEN pg_catalog.pg_try_advisory_xact_lock(k.lock_id) THEN`,
				new:  `CASE WHEN pg_catalog.pg_advisory_xact_lock(k.lock_id) IS NOT NULL THEN`,
			},
			{
				file: "idempotency/many.go",
				old:  "\tslices.Sort(ids)\n\tids = slices.Compact(ids)\n",
				new:  "\t_ = slices.Contains(ids, 0)\n",
			},
		},
		caught: suite{pkg: "./txn", run: "^TestMany_OppositeOrdersNeverDeadlock$"},
	},
	{
		name: "a batch that leaves its lost COMMIT to the next call",
		why:  "keys that have committed run once more",
		edits: []edit{{
			file: "txn/many.go",
			old:  `if s.kind == kindUnknown {`,
			new:  `if s.kind == kindUnknown && false {`,
		}},
		caught: suite{pkg: "./internal/faultsuite", run: "^TestFault_LostCommitOfMany$"},
	},
}
