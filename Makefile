# Everything runs in .venv, which `make setup` creates and keeps up to date (deploy/setup.sh; EXTRA=gpu for CUDA).
# ARGS go to the command behind a target: make test ARGS="-k ledger -x", make demo ARGS="trainer.learning_rate=0"
SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=
EXTRA ?=
BIN := .venv/bin

.PHONY: help setup demo test test-system check bench bench-startup bench-reward staleness protos docs lock clean distclean
.PHONY: check-ruff check-format check-types check-imports check-protos check-docs

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup:  ## create or update .venv (no root, no compiler; does nothing when it is up to date)
	@EXTRA=$(EXTRA) deploy/setup.sh

demo: setup  ## train a tiny model through the real services, in about five minutes
	@$(BIN)/tandem demo $(ARGS)

test: setup  ## every test that needs no whole run: at most 12 minutes on 2 cores
	@$(BIN)/pytest -n 2 --dist worksteal -m "not system and not slow" --durations=10 $(ARGS)

test-system: setup  ## recipes, replays and kills with real processes: at most 30 minutes on 2 cores
	@$(BIN)/pytest -m "system or slow" --durations=10 $(ARGS) || { code=$$?; [ $$code -eq 5 ] && echo "test-system: nothing was selected"; }

check: setup  ## lint, format, types, the house's import rules, freshness of what is generated: at most a minute
	@$(MAKE) --no-print-directory -k -j2 -O check-types check-ruff check-format check-imports check-protos check-docs

check-ruff:
	@$(BIN)/ruff check --quiet --output-format concise .

check-format:
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "format: run .venv/bin/ruff format ."; exit 1; }

check-types:
	@deploy/source_links.sh
	@$(BIN)/mypy

check-imports:
	@deploy/source_links.sh && rm -rf build/copy && cp -rL build/links build/copy  # import-linter follows no links
	@cd build/copy && ../../$(BIN)/lint-imports --no-cache --no-logo --config ../../pyproject.toml

check-protos:
	@deploy/protos.sh --check

check-docs:
	@$(BIN)/python -m services.config.docs --check

bench: setup  ## how much of the time sampling and training overlap (writes JSON)
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-startup: setup  ## how long until the first batch is trained, and until a sampler alone is ready (writes JSON)
	@$(BIN)/python benchmarks/startup.py $(ARGS)

bench-reward: setup  ## what the reward service costs and withstands (writes JSON)
	@$(BIN)/python benchmarks/reward.py $(ARGS)

staleness: setup  ## what staleness costs, with and without off-policy correction: 60 whole runs, resumable (writes JSON)
	@$(BIN)/python benchmarks/staleness.py $(ARGS)

protos: setup  ## regenerate the stubs of protos/*.proto
	@deploy/protos.sh

docs: setup  ## regenerate docs/configuration.md from the configuration models
	@$(BIN)/python -m services.config.docs

lock:  ## rewrite constraints-cpu.txt from a fresh install of pyproject.toml's ranges
	@deploy/setup.sh --lock

clean:  ## remove caches and build leftovers; keeps .venv and runs/
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## … and .venv
	@rm -rf .venv
