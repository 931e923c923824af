# Every target does its own set-up; all are safe to run twice. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup gpu quickstart base-model browser test test-fast test-slow lint format doctor clean
SHELL := /bin/bash
export PYTHON TE
# What the hooks of `make lint` keep between runs stays in .venv, not in the home folder.
export PRE_COMMIT_HOME := $(CURDIR)/.venv/.pre-commit
# Three workers for two cores, since much of a test is waiting for processes. Four thrash in 24 GiB of memory.
# tests/conftest.py shares tests out to workers.
WORKERS := --dist loadfile --no-loadscope-reorder
# Compiled tests are kept, whatever the environment says: to compile their asserts takes longer than to import them.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv and install what is missing; nothing to do when it is there
	@tools/setup.sh

gpu:  ## the same for a machine with GPUs; TE=0 leaves Transformer Engine out
	@tools/setup.sh gpu

quickstart: setup  ## train a tiny model from the committed base to high accuracy, on CPU, in minutes
	@PATH="$(CURDIR)/.venv/bin:$$PATH" examples/quickstart/run.sh

base-model: setup  ## make the quickstart's base model anew (up to an hour on 2 cores)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" examples/quickstart/make_base.sh

browser: setup  ## a headless Chromium in .venv/browser, for the tests that look at pages (needs node and npm)
	@tools/browser.sh

test-fast: setup  ## the tests that start no engine and no other process, two minutes
	@$(PYTEST) -q -m "not slow and not gpu" --fast -rfE

test: setup  ## the tests, some minutes
	@$(PYTEST) -q -m "not slow and not gpu" -n 3 $(WORKERS)

test-slow: setup  ## the tests that take minutes, a whole quickstart among them
	@tools/browser.sh || echo "without a browser: its tests are skipped"
	@$(PYTEST) -q -m "slow and not gpu" --timeout 1800 -n 2 $(WORKERS)

lint: setup  ## ruff, import rules, mypy, the budget of lines and words; changes nothing
	@.venv/bin/pre-commit run --all-files --color never

format: setup  ## let ruff format and fix what it can
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format .

doctor: setup  ## what this machine has and lacks, and what follows
	@.venv/bin/or1 doctor

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info */*.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
