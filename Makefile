# quantmint: `make` prints what there is. Environments are built on demand, once, in .venv and .venv-vllm.

RECIPE  ?= tiny-ptpc-fp8kv
ARGS    ?=
# Test files that run at a time.
JOBS    ?= 2
PYTHON  ?= python3
# A machine with a GPU wants its own build: TORCH="torch --index-url ..." or an environment that has it, VENV=...
TORCH   ?= torch==2.13.0
VENV    ?= .venv
# The embedded recipe is served on the CPU, also beside a GPU.
BACKEND ?= $(if $(filter tiny-%,$(RECIPE)),cpu,auto)

BIN       := $(VENV)/bin
QUANTMINT := $(BIN)/quantmint
RUN_ENV   := $(VENV)/.quantmint-run
TEST_ENV  := $(VENV)/.quantmint-test

.DEFAULT_GOAL := help
.PHONY: help quantize plan test lint format bench-quantize bench-kernels bench-memory-fit bench-throughput report clean distclean serving browser

help:  ## this text
	@echo "quantmint: quantize, prove, publish.  make TARGET [RECIPE=$(RECIPE)] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quantize: $(RUN_ENV) serving  ## make, prove and publish RECIPE (default: the embedded tiny model, on this CPU)
	@$(QUANTMINT) run $(RECIPE) $(ARGS)

plan: $(RUN_ENV)  ## what a run of RECIPE would do and cost
	@$(QUANTMINT) plan $(RECIPE) $(ARGS)

report: $(RUN_ENV)  ## where the newest report of RECIPE is
	@$(QUANTMINT) report $(RECIPE) $(ARGS)

test: $(TEST_ENV) browser  ## all tests that this machine can run
	@$(MAKE) --no-print-directory serving BACKEND=cpu
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(TEST_ENV)  ## ruff and mypy --strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(TEST_ENV)  ## rewrite the sources in the house's style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-kernels: $(TEST_ENV)  ## each scheme's kernel, eager and compiled
	@$(BIN)/python -m tests.bench.kernels $(ARGS)

bench-quantize: $(TEST_ENV)  ## how fast the stream engine is beside cp, llm-compressor and Quark
	@$(BIN)/python -m tests.bench.quantize --double --json docs/bench-quantize.json --plot docs/bench-quantize.svg $(ARGS)

bench-memory-fit: $(TEST_ENV)  ## the KV cache that plans predict beside the one that vLLM makes, on this GPU and CPU
	@QUANTMINT_MEMORY_FIT=$${QUANTMINT_MEMORY_FIT:-memory-fit.jsonl} $(BIN)/python -m pytest -q -s \
	  tests/gpu/test_memory_fit.py tests/serving/memory/test_memory_real_vllm.py $(ARGS)

bench-throughput: $(TEST_ENV)  ## served beside bf16 on this GPU: ratios over fresh launches; ARGS="--hardware mi300x"
	@$(BIN)/python -m tests.bench.throughput $(ARGS)

clean:  ## remove the store and what was published to ./published
	rm -rf store published

distclean: clean  ## ... and the environments
	rm -rf .venv .venv-vllm *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The serving environment: vLLM's pins clash with ours, so it lives apart. Returns at once when it is there.
serving: $(RUN_ENV)
	@[ -n "$$QUANTMINT_VLLM" ] || $(BIN)/python -m pipeline.serving.install --venv .venv-vllm --backend $(BACKEND)

browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get -qq update && apt-get -qq -y install chromium chromium-driver >/dev/null; } \
	  || echo "note: no chromium with chromedriver here; the browser tests will be skipped" >&2

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("quantmint needs Python 3.11 or newer, found " + sys.version) if sys.version_info < (3, 11) else None'
	@echo "creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)

$(RUN_ENV): pyproject.toml | $(VENV)/bin/python
	@echo "installing what quantizes and judges into $(VENV); this takes a few minutes the first time" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[all]'
	@touch $@

$(TEST_ENV): pyproject.toml | $(RUN_ENV)
	@echo "installing the test tools and the libraries that serve as oracles into $(VENV)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
