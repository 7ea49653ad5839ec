# make setup   the environments: .venv, and .venv-sglang for SGLang; quick when nothing changed
# make check   format, lint, types and the repository's rules
# make test    every test, with real engines on CPU; of large tables a part, chosen so that every row and column occurs.
#              WORKERS=1 is slower and takes half the memory
# make test-all  the same with the whole tables; a few minutes more
# make matrix  the coverage matrix of families, trainer layouts and engine layouts, written to docs/coverage.md
# make demo    a live vLLM server follows a real Megatron trainer; ENGINE=sglang takes an SGLang server, ENGINE=both
#              takes both; other layouts: make demo TRAINER="tp=1,pp=2" ENGINE_TP=1
# make chaos   the fault campaign: real processes are killed, stopped, cut off and starved; about an hour.
#              CHAOS_SEED=1 draws other faults, CHAOS_COUNT=50 fewer, CHAOS_ONLY="meta server, commit" those of a name
# make bench   the benchmarks, with their goals
# make format  rewrites the files the way "make check" wants them
# make clean   removes the environments and everything that was built

SHELL := bash
PY := .venv/bin/python
MAKEFLAGS += --no-print-directory
# Where it is set, each of hundreds of processes would compile our modules for itself.
unexport PYTHONDONTWRITEBYTECODE

ENGINE ?= vllm
TRAINER ?= tp=2
ENGINE_TP ?= 2
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH ?=
CHAOS_SEED ?= 0
CHAOS_COUNT ?= 354
CHAOS_ONLY ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-sglang check test test-all matrix demo chaos bench format clean
.NOTPARALLEL:  # both set-ups build in this tree

help:
	@sed -n 's/^# //p' Makefile

setup: setup-vllm setup-sglang

setup-vllm setup-sglang: setup-%:
	@tests/setup_env.sh $*

check: setup-vllm
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/rules

# The tests of a file share processes, so a worker runs whole files; what takes long goes first (tests/conftest.py).
test: setup
	$(PY) -m tests.ready '$(WORKERS)'
	$(PY) -m pytest tests --numprocesses '$(WORKERS)' --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all: export AWEX_ALL_CELLS = 1
test-all: test

matrix: setup
	$(PY) -m tests.matrix --write docs/coverage.md

demo: setup-vllm $(if $(filter sglang both,$(ENGINE)),setup-sglang)
	@ENGINE='$(ENGINE)' TRAINER='$(TRAINER)' ENGINE_TP='$(ENGINE_TP)' $(PY) -m tests.demo

# The table in the document is that of whole campaigns.
chaos: setup
	@$(PY) -m tests.chaos --seed '$(CHAOS_SEED)' --count '$(CHAOS_COUNT)' --only '$(CHAOS_ONLY)' \
		$(if $(CHAOS_ONLY),,--write docs/reliability.md)

bench: setup-vllm
	$(PY) -m benchmarks $(BENCH)

format: setup-vllm
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .venv-sglang .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
