# Everything runs in .venv, which `make setup` creates and keeps up to date (deploy/setup.sh; EXTRA=gpu for CUDA).
# ARGS go to the command behind a target: make test ARGS="-k ledger -x", make demo ARGS="trainer.learning_rate=0"
SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=
EXTRA ?=
BIN := .venv/bin
# A worker gets whole files, the longest first (tests/conftest.py): fixtures of many are runs, which start slowly.
FILES := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 2

.PHONY: help setup demo demo-agent test test-system test-deploy chaos check protos docs lock
.PHONY: bench bench-startup bench-reward bench-sampler bench-fleet bench-trl bench-size gpu-proof staleness
.PHONY: check-ruff check-format check-types check-imports check-house check-protos check-docs clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		while IFS=$$'\t' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup:  ## create or update .venv (needs no root and no compiler)
	@EXTRA=$(EXTRA) deploy/setup.sh

demo: setup  ## train a tiny model through the real services, in about two minutes
	@$(BIN)/tandem demo $(ARGS)

demo-agent: setup  ## train a tiny model to play a game of several turns with an environment, in five minutes
	@$(BIN)/tandem demo --task guess_number $(ARGS)

test: setup  ## unit, property and service tests
	@$(BIN)/pytest -n 2 --dist worksteal -m "not system and not slow and not deploy" --durations=10 $(ARGS)

test-system: setup  ## whole runs with real processes: recipes, replays, kills
	@$(BIN)/pytest $(FILES) -m "(system or slow) and not deploy" --durations=10 $(ARGS) || \
		{ code=$$?; [ $$code -eq 5 ] && echo "test-system: no test was selected"; }

test-deploy: setup  ## compose, Ray, Helm, several hosts, dashboard, metrics, scaling, security
	@$(BIN)/pytest $(FILES) -m deploy --durations=10 $(ARGS)

chaos: setup  ## 200 random faults over a run of the demo's model: 35 minutes (writes JSON; ARGS="--faults 20")
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

check: setup  ## lint, format, types, import rules, house rules, generated files: about a minute
	@$(MAKE) --no-print-directory -k -j2 -O \
		check-types check-ruff check-format check-imports check-house check-protos check-docs

check-ruff:
	@$(BIN)/ruff check --quiet --output-format concise .

check-format:
	@$(BIN)/ruff format --check --quiet --output-format concise . || \
		{ echo "format: run .venv/bin/ruff format ."; exit 1; }

check-types:
	@deploy/source_links.sh
	@$(BIN)/mypy

check-imports:
	@deploy/source_links.sh && rm -rf build/copy && cp -rL build/links build/copy  # import-linter follows no links
	@cd build/copy && ../../$(BIN)/lint-imports --no-cache --no-logo --config ../../pyproject.toml

check-house:
	@$(BIN)/python tests/project/house.py

check-protos:
	@deploy/protos.sh --check

check-docs:
	@$(BIN)/python -m tandem.services.config.docs --check
	@$(BIN)/python -m tandem.services.metrics.docs --check

bench: setup  ## the share of time in which sampling and training overlap (writes JSON)
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-startup: setup  ## time to the first trained batch, and to a sampler that is ready (writes JSON)
	@$(BIN)/python benchmarks/startup.py $(ARGS)

bench-reward: setup  ## throughput, latency and memory of the reward service (writes JSON)
	@$(BIN)/python benchmarks/reward.py $(ARGS)

bench-sampler: setup  ## tokens per second and CPU time of a sampler over those of raw vLLM (writes JSON)
	@$(BIN)/python benchmarks/sampler.py $(ARGS)

bench-fleet: setup  ## what a group costs Redis with 1,024 samplers and with 10⁶ groups of history (JSON)
	@$(BIN)/python benchmarks/fleet.py $(ARGS)

bench-trl: setup  ## the same training with TRL and with Tandem, in turns: 45 minutes (writes JSON)
	@$(BIN)/python benchmarks/against_trl.py $(ARGS)

bench-size: setup  ## a model of 494 M parameters through the whole ring: memory and seconds (writes JSON)
	@$(BIN)/python benchmarks/real_size.py $(ARGS)

gpu-proof: setup  ## what the GPUs of this machine can show (writes benchmarks/records/gpu.md)
	@$(BIN)/python benchmarks/gpu_proof.py $(ARGS)

staleness: setup  ## the cost of staleness by correction: 60 whole runs, resumable (writes JSON)
	@$(BIN)/python benchmarks/staleness.py $(ARGS)

protos: setup  ## regenerate the stubs of protos/*.proto
	@deploy/protos.sh

docs: setup  ## regenerate docs/configuration.md and the list of docs/metrics.md
	@$(BIN)/python -m tandem.services.config.docs
	@$(BIN)/python -m tandem.services.metrics.docs

lock:  ## rewrite constraints-cpu.txt from a fresh install of pyproject.toml's ranges
	@deploy/setup.sh --lock

clean:  ## remove caches and build output; keep .venv and runs/
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	@rm -rf .venv
