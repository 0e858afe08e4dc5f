# make demo           tune a made-up training on this machine, in about 2 minutes; needs no GPU and no account
# make test           every check and every test
# make check          formatting, lint, types, import rules
# make bench-trial    how long a trial takes to reach its first step, against a fresh `trl` process
# make bench-lengths  measuring token lengths, against TRL's own preparation
# make bench-packing  planning packed rows, against TRL's own packing
# make bench-memory   the estimated peaks of candidates, against real trainings
# make bench-sweep    measure every candidate of a job, 20 to 40 minutes: make bench-sweep ARGS="--job chat"
# make bench-search   the search against recorded sweeps; writes docs/search.md
# make bench-e2e      plain `trl sft` with the config before and after tuning

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test check pytest format install install-dev bench-trial bench-lengths bench-packing bench-memory bench-sweep bench-search bench-e2e clean

BUDGET ?= 100s
TESTS ?=
ARGS ?=
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)

BIN := .venv/bin
HASH := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
INSTALLED := .venv/.installed-$(HASH)
INSTALLED_DEV := .venv/.installed-dev-$(HASH)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/python -m pip install --quiet
# Without a GPU the 200 MB build of PyTorch will do, from PyTorch's own index; where that cannot be reached, any build.
CPU_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15

demo: $(INSTALLED)
	$(BIN)/trl-autotune sft --demo --auto --budget $(BUDGET)

test: check pytest

check: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

pytest: $(INSTALLED_DEV)
	$(BIN)/python -m pytest $(TESTS)

format: $(INSTALLED_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-trial: $(INSTALLED)
	$(BIN)/python benchmarks/trial_startup.py $(ARGS)

bench-lengths: $(INSTALLED)
	$(BIN)/python benchmarks/lengths.py $(ARGS)

bench-packing: $(INSTALLED)
	$(BIN)/python benchmarks/packing.py $(ARGS)

bench-memory: $(INSTALLED_DEV)
	PYTHONPATH=. $(BIN)/python benchmarks/memory.py $(ARGS)

bench-sweep: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python benchmarks/sweep.py $(ARGS)

bench-search: $(INSTALLED_DEV)
	PYTHONPATH=. $(BIN)/python benchmarks/search.py $(ARGS)

bench-e2e: $(INSTALLED)
	$(BIN)/python benchmarks/end_to_end.py $(ARGS)

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer here (python3 is $$(python3 --version 2>&1))" >&2; \
		echo "hint: install one and name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
	$(PYTHON) -m venv .venv

.venv/.torch: | $(BIN)/python
	@if ! nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then \
		echo "No NVIDIA GPU here: installing PyTorch for the CPU"; \
		$(PIP) --no-deps $(CPU_INDEX) $$(grep '^torch==' constraints.txt); \
	fi
	@touch $@

$(INSTALLED): | .venv/.torch
	$(PIP) -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): | .venv/.torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@ $(INSTALLED)

clean:
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
