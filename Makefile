# Everything here runs from a bare clone on Debian with Python 3.11; `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ENVIRONMENT ?= vllm-0.32
SGLANG ?= sglang-0.5
PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
RUN := $(VENV)/bin/python
STEP := scripts/step
CODE := $(wildcard kvtier connectors kernels tests benchmarks examples scripts)
MINUTES ?= 30
# Test files run side by side in this many processes; engines start in them, so more than a few need much memory.
WORKERS ?= 2
BENCH ?= $(filter-out __init__,$(basename $(notdir $(wildcard benchmarks/[a-z]*.py))))

.PHONY: help env env-sglang check test test-sglang demo demo-sglang bench soak fmt lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## Build the pinned environment .venv (minutes once, then nothing)
	@$(STEP) "environment $(ENVIRONMENT)" $(PYTHON) scripts/environment.py requirements/$(ENVIRONMENT).toml --venv $(VENV)

env-sglang: ## Build the pinned environment .venv-sglang, with SGLang instead of vLLM
	@$(STEP) "environment $(SGLANG)" $(PYTHON) scripts/environment.py requirements/$(SGLANG).toml --venv .venv-sglang

check: env ## Lint, formatting, types and the direction of imports
	@$(STEP) "ruff check" $(RUN) -m ruff check $(CODE)
	@$(STEP) "ruff format" $(RUN) -m ruff format --check $(CODE)
	@$(STEP) "mypy" $(RUN) -m mypy
	@$(STEP) "import-linter" $(VENV)/bin/lint-imports --no-logo

test: check $(if $(SGLANG),env-sglang) ## Check and run the whole test suite (ARGS="-k nvme" narrows it, SGLANG= leaves SGLang out)
	@$(STEP) "tests" $(RUN) -m pytest -n $(WORKERS) --dist loadfile --durations=15 $(ARGS)

test-sglang: env env-sglang ## SGLang's tests in full: real servers for every pool and layout, and both engines' contract
	@$(STEP) "SGLang's tests" env KVTIER_SGLANG_FULL=1 $(RUN) -m pytest --durations=15 tests/sglang tests/contract/engine $(ARGS)

demo: env ## Serve a real model through kvtier and measure (ARGS=--json for one JSON object)
	@$(RUN) -m examples.demo $(ARGS)

demo-sglang: env env-sglang ## The same below SGLang's own host cache, restart included (ARGS=--json for one JSON object)
	@$(RUN) -m examples.demo_sglang $(ARGS)

bench: env ## Run the benchmarks (BENCH="overhead peers" chooses, ARGS is passed on)
	@for name in $(BENCH); do $(STEP) "benchmark $$name" $(RUN) -m benchmarks.$$name $(ARGS) || exit $$?; done

soak: env ## Draw new property and fault tests for MINUTES=30, until one fails (ARGS is passed on)
	@end=$$((SECONDS + 60 * $(MINUTES))); round=1; \
	while [ $$SECONDS -lt $$end ]; do \
	  seed=$$RANDOM$$RANDOM; \
	  $(STEP) "soak round $$round, seed $$seed" env -u CI KVTIER_SOAK=1 $(RUN) -m pytest -q --maxfail=1 --hypothesis-seed=$$seed \
	    tests/property tests/fault tests/contract tests/sim/test_soak.py $(ARGS) || exit $$?; \
	  round=$$((round + 1)); \
	done

fmt: env ## Format the code and apply ruff's safe fixes
	@$(RUN) -m ruff format $(CODE)
	@$(RUN) -m ruff check --fix $(CODE)

lock: ## Resolve requirements/$(ENVIRONMENT).toml again into its lock file
	@$(STEP) "lock" $(PYTHON) scripts/lock.py requirements/$(ENVIRONMENT).toml

clean: ## Remove this checkout's environment and tool caches (the shared packages and models in ~/.cache stay)
	rm -rf $(VENV) .venv-sglang build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
