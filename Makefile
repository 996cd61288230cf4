# The two commands of the project: `make demo` and `make test`. They need Go, make and git; PostgreSQL and Redis are
# found, or started as throw-away servers, by internal/devstack.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

ARGS      ?=
TESTFLAGS ?=
TIMEOUT   ?= 10m
FUZZTIME  ?= 60s

# All modules of go.work, and our own Go files of all of them.
modules = $(shell go list -m -f '{{.Dir}}')

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## run the order service of cmd/demo (ARGS=... are passed on)
	go run ./cmd/demo $(ARGS)

.PHONY: test
test: ## run all tests of all modules
	go test -timeout $(TIMEOUT) $(TESTFLAGS) work

.PHONY: test-race
test-race: ## the same with the race detector, in random order
	go test -timeout $(TIMEOUT) -race -shuffle=on $(TESTFLAGS) work

# npm's binaries, see internal/devstack.
VERSIONS ?= 17 18
# They come without pg_dump, and an older one refuses: what compares dumps runs on the version of this machine only.
compare_dumps := ^(TestMigrate_UpDownUpIsTheSchemaOfTheRepository|TestInstall_AllWaysLeaveTheSameDatabase)$$

.PHONY: test-versions
test-versions: ## the tests of everything that talks to PostgreSQL, on each of VERSIONS (17 18), at the same time
	@logs=$$(mktemp -d); trap 'rm -rf $$logs' EXIT; running=(); failed=0; \
	for version in $(VERSIONS); do \
		PGONCE_STACK=npm PGONCE_POSTGRES_VERSION=$$version go test -timeout $(TIMEOUT) -count=1 $(TESTFLAGS) \
			-skip '$(compare_dumps)' ./db ./idempotency ./txn ./txnsql ./internal/faultsuite >$$logs/$$version 2>&1 & running+=($$!); \
	done; \
	for one in $${running[@]}; do wait $$one || failed=1; done; \
	for version in $(VERSIONS); do echo "== PostgreSQL $$version"; cat $$logs/$$version; done; \
	exit $$failed

.PHONY: test-docker
test-docker: ## the Docker provider, on a real engine (PGONCE_POSTGRES_IMAGE, PGONCE_REDIS_IMAGE)
	go test -timeout $(TIMEOUT) -count=1 $(TESTFLAGS) -tags docker -run '^TestEngine_' ./internal/devstack

.PHONY: faults
faults: ## lost COMMITs, killed processes and servers, failovers, at full size (about 5 minutes), with their counts
	PGONCE_FAULTS=full go test -tags failpoints -timeout 15m -v ./internal/faultsuite | grep --line-buffered -E 'faults:|^(---|FAIL|ok)'

.PHONY: matrix
matrix: ## run the suites again behind PgBouncer, in other modes, pools, levels, zones and clocks (about 6 minutes)
	go run ./internal/matrix $(ARGS)

.PHONY: planted
planted: ## plant known bugs one at a time, in copies, and demand that the tests named for each go red (ARGS='-run name')
	go run ./internal/planted $(ARGS)

.PHONY: fuzz
fuzz: ## run every fuzz target of the main module for FUZZTIME (60s)
	.ci/fuzz $(FUZZTIME)

.PHONY: bench
bench: ## compare with a bare transaction and with other libraries (ARGS=... are passed on)
	cd bench && go run . $(ARGS)

.PHONY: lint
lint: bin/golangci-lint bin/gofumpt ## format and linters, on all modules
	@stale=$$(bin/gofumpt -l .); if [ -n "$$stale" ]; then echo "not formatted (bin/gofumpt -w .):"; echo "$$stale"; exit 1; fi
	go vet -tags docker,pooler work
	go vet -tags failpoints ./internal/failpoint ./internal/faultsuite
	@for dir in $(modules); do echo "golangci-lint: $$dir"; (cd $$dir && $(CURDIR)/bin/golangci-lint run ./...); done
	@echo "golangci-lint: failpoints"; bin/golangci-lint run --build-tags failpoints ./internal/failpoint ./internal/faultsuite
	@cd vet && go build -o $(CURDIR)/bin/pgoncevet ./cmd/pgoncevet
	@for dir in $(modules); do echo "pgoncevet: $$dir"; (cd $$dir && $(CURDIR)/bin/pgoncevet -test=false ./...); done

.PHONY: generate
generate: bin/sqlc ## write internal/dbsqlc, db/install.sql and db/schema.sql anew
	bin/sqlc generate
	go run ./internal/dbgen

# What txn must never bring into a program, and the lock functions whose lock outlives the transaction.
txn_without  := go-redis|goose|testcontainers|testify|net/http
session_lock := pg_(try_)?advisory_lock(_shared)?\(

.PHONY: verify
verify: bin/sqlc bin/golangci-lint ## fail on stale generated files, untidy modules, imports that point up
	bin/sqlc diff
	go run ./internal/dbgen -check
	go run ./internal/pgtest/withpg PGONCE_SQLC_URL bin/sqlc vet
	@for dir in $(modules); do echo "go mod tidy: $$dir"; (cd $$dir && GOWORK=off go mod tidy -diff); done
	@for dir in $(modules); do echo "imports: $$dir"; (cd $$dir && $(CURDIR)/bin/golangci-lint run --enable-only depguard ./...); done
	@echo "requirements of txn and txnsql"; deps=$$(go list -deps ./txn ./txnsql); \
	if grep -E '$(txn_without)' <<<"$$deps"; then echo "./txn and ./txnsql must not need the packages above"; exit 1; fi
	@echo "session locks"; \
	if grep -rnE '$(session_lock)' --include='*.go' --include='*.sql' --exclude='*_test.go' .; then \
		echo "these locks outlive the transaction and do not work through a pooler: use pg_advisory_xact_lock"; exit 1; fi
	@echo "clock"; \
	if grep -rnE 'time\.(Now|Since|Until)\>' --include='*.go' --exclude='*_test.go' idempotency txn | grep -v '^txn/clock.go:'; then \
		echo "ownership and expiry are by PostgreSQL's clock; a duration of this process is measured in txn/clock.go"; exit 1; fi

.PHONY: tools
tools: bin/golangci-lint bin/gofumpt bin/sqlc bin/goose ## build the pinned tools into bin/ (minutes, once)

bin/golangci-lint: package = github.com/golangci/golangci-lint/v2/cmd/golangci-lint
bin/gofumpt:       package = mvdan.cc/gofumpt
bin/sqlc:          package = github.com/sqlc-dev/sqlc/cmd/sqlc
bin/goose:         package = github.com/pressly/goose/v3/cmd/goose
# goose with PostgreSQL only: its other drivers are most of its size.
bin/goose:         tags    = no_mysql no_sqlite3 no_clickhouse no_mssql no_vertica no_ydb no_libsql no_turso no_starrocks no_spanner no_duckdb

bin/%: tools/%.mod tools/%.sum
	GOWORK=off go build -modfile=$< -tags '$(tags)' -o $@ $(package)
	@touch $@

.PHONY: clean
clean: ## remove what was built here
	rm -rf bin bench/out
	find . -name '*.test' -type f -delete
	find . -name '*.prof' -type f -delete
