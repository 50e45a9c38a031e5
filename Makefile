# Every command of the project. The work is done by scripts/, so that people and CI run the same thing;
# each script sets up what it needs by itself. The sentence behind "##" is what `make help` shows.

SHELL := bash
.DEFAULT_GOAL := help

# PYTHON=/path/to/python3.12 picks the interpreter for the virtual environment (3.11 or newer).
export PYTHON
# ARGS goes to pytest (make test) or to the benchmark runner (make bench).
ARGS ?=
# What scripts/image goes by.
export BASE EXTRAS IMAGE PYTHON_VERSION
# SECONDS is how long `make test-long` goes on with new seeds (3600), and `make fuzz` for each target (600).
SECONDS ?=

.PHONY: help setup demo test test-fast test-long test-compiled test-pythons check bench bench-cluster bench-hostile bench-peers bench-spark fuzz mutate sbom wheels release image docs clean

help: ## List the commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## Make the virtual environment .venv with all that make test needs; does nothing when it is up to date.
	@scripts/setup

demo: ## Show in the terminal what Penstock does, and then in the browser.
	@scripts/demo

test: ## Run everything that must hold: linter, formatter, types, all tests (ARGS="tests/cli -x" for a part).
	@scripts/test $(ARGS)

test-fast: ## Run the linter and the quick tests, without Spark, browser and NATS, within two minutes.
	@scripts/test --fast $(ARGS)

test-long: ## Run the tests that make test leaves out, then crashes, cuts, restarts and models on new seeds for SECONDS=3600.
	@scripts/test-long --seconds $(or $(SECONDS),3600) $(ARGS)

test-compiled: ## Run all tests once more, on the hot modules compiled by mypyc.
	@scripts/test --compiled $(ARGS)

test-pythons: ## Run make test on every Python from 3.11 on that is found, each in an environment of its own.
	@scripts/test-pythons $(ARGS)

check: ## Run the linter, the formatter's check, the type checker and the table of layers.
	@scripts/check

bench: ## Measure this tree on this machine (ARGS="--json FILE").
	@scripts/bench $(ARGS)

bench-peers: ## Measure Penstock beside Redis, NATS, RabbitMQ and beanstalkd, about 25 minutes (ARGS="--write-docs").
	@scripts/bench peers $(ARGS)

bench-cluster: ## Measure three NATS nodes with two and three front-ends on this machine, about five minutes (ARGS="--json FILE"); JOIN_GB=10: only how one joins.
	@scripts/bench cluster $(ARGS)

bench-hostile: ## Measure a well-behaved pair of clients beside attacks, about 11 minutes (ARGS="--json FILE").
	@scripts/bench hostile $(ARGS)

bench-spark: ## Measure Spark with Penstock beside Spark's own reader, about 6 minutes (ARGS="--json FILE").
	@scripts/bench spark $(ARGS)

fuzz: ## Feed the protocol parsers random bytes, SECONDS=600 for each target.
	@scripts/fuzz $(or $(SECONDS),600)

mutate: ## Make small wrong changes where data lives; print those that no test notices (ARGS="--count 20 --seed 7").
	@scripts/mutate $(ARGS)

sbom: ## Write the bill of materials of what .venv has, build/sbom.cdx.json, as CycloneDX.
	@scripts/sbom $(ARGS)

wheels: ## Build dist/: sdist, pure wheel, and a compiled wheel for every Python that is found; try each.
	@scripts/wheels

release: ## Check and build all that a release has, and tag it (ARGS=--dry-run tags nothing).
	@scripts/release $(ARGS)

image: ## Build the image localhost/penstock with buildah, podman or docker (BASE=… PYTHON_VERSION=3.13).
	@scripts/image $(ARGS)

docs: ## Build the documentation's site into build/site and check its links (ARGS=serve shows it while you write).
	@scripts/docs $(ARGS)

clean: ## Remove the virtual environment, caches and everything that was built.
	@scripts/clean
