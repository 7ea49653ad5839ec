# make setup   the environment, in .venv; quick when nothing changed
# make check   format, lint, types and the repository's rules
# make test    every test, with real engines on CPU
# make demo    a live vLLM server follows a real Megatron trainer; e.g. make demo TRAINER="tp=1,pp=2" ENGINE_TP=1
# make bench   the benchmarks, with their goals
# make format  rewrites the files the way "make check" wants them
# make clean   removes the environment and everything that was built

SHELL := bash
PY := .venv/bin/python
MAKEFLAGS += --no-print-directory

TRAINER ?= tp=2
ENGINE_TP ?= 2
PYTEST_ARGS ?=
BENCH ?=

.DEFAULT_GOAL := help
.PHONY: help setup check test demo bench format clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@tests/setup_env.sh

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/rules

test: setup
	$(PY) -m pytest tests $(PYTEST_ARGS)

demo: setup
	@TRAINER='$(TRAINER)' ENGINE_TP='$(ENGINE_TP)' $(PY) -m tests.demo

bench: setup
	$(PY) -m benchmarks $(BENCH)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
