# quantmint: `make` prints what there is. Environments are built on demand, once, in .venv and .venv-vllm.

# Of the embedded model: vLLM's CPU attention reads an FP8 KV cache with AVX-512 or AMX only.
RECIPE  ?= $(if $(shell grep -Em1 'avx512f|amx_tile' /proc/cpuinfo 2>/dev/null),tiny-ptpc-fp8kv,tiny-ptpc)
ARGS    ?=
# Test files that run at a time: one more than cores, since they wait for a third of theirs; each takes a gigabyte or two.
JOBS    ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
PYTHON  ?= python3
# A machine with a GPU wants its own build: TORCH="torch --index-url ..." or an environment that has it, VENV=...
TORCH   ?= torch==2.13.0
VENV    ?= .venv
# The embedded recipe is served on the CPU, also beside a GPU.
BACKEND ?= $(if $(filter tiny-%,$(RECIPE)),cpu,auto)

BIN       := $(VENV)/bin
QUANTMINT := $(BIN)/quantmint
PIP       := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Modules are compiled when they are imported first, which few of them ever are; of this switch, 0 is pip's "yes".
export PIP_NO_COMPILE ?= 0
# Some images forbid Python to keep what it compiled: hundreds of processes would compile the same libraries again.
unexport PYTHONDONTWRITEBYTECODE
TORCH_ENV := $(VENV)/.quantmint-torch
RUN_ENV   := $(VENV)/.quantmint-run
TEST_ENV  := $(VENV)/.quantmint-test
# What is fetched is fetched beside each other; a failure is make's once the rest has come to its end.
BESIDE    := $(MAKE) --no-print-directory -j 3

.DEFAULT_GOAL := help
.PHONY: help quantize plan docs test lint format bench-quantize bench-decode bench-quality bench-kernels bench-memory-fit bench-throughput bench-scaling bench-deepseek bench-devices bench-experts gate-simulations walk soak mutation zoo trap report clean distclean serving browser

help:  ## this text
	@echo "quantmint: quantize, prove, publish.  make TARGET [RECIPE=$(RECIPE)] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quantize:  ## make, prove and publish RECIPE (default: the embedded tiny model, on this CPU)
	@$(BESIDE) $(RUN_ENV) serving
	@$(QUANTMINT) run $(RECIPE) $(ARGS)

plan: $(RUN_ENV)  ## what a run of RECIPE would do and cost
	@$(QUANTMINT) plan $(RECIPE) $(ARGS)

report: $(RUN_ENV)  ## where the newest report of RECIPE is
	@$(QUANTMINT) report $(RECIPE) $(ARGS)

docs: $(RUN_ENV)  ## docs/ as a site without a network, in build/docs, with the newest report of RECIPE
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(PIP) --editable '.[docs]'
	@$(BIN)/mkdocs build --quiet --strict
	@$(QUANTMINT) report $(RECIPE) --output build/docs/report.html >/dev/null || echo "make quantize makes that report" >&2
	@echo build/docs/index.html

test:  ## the fast tests; SLOW=1: all that this machine can run
	@$(BESIDE) $(TEST_ENV) serving browser BACKEND=cpu
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(SLOW),,-m 'not slow') $(ARGS)

lint: $(TEST_ENV)  ## ruff, mypy --strict, who may import whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tests.tools.wording

format: $(TEST_ENV)  ## rewrite the sources in the house's style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-kernels: $(TEST_ENV)  ## each scheme's kernel, eager and compiled
	@$(BIN)/python -m tests.bench.kernels $(ARGS)

bench-quantize: $(TEST_ENV)  ## `quantmint quantize` as a whole process, beside cp, llm-compressor and Quark
	@$(BIN)/python -m tests.bench.quantize --json docs/bench-quantize.json --plot docs/bench-quantize.svg $(ARGS)

bench-decode: $(TEST_ENV)  ## INT4 to MXFP4 and MXFP4 to FP8 as whole processes, beside cp and Quark's file to file
	@$(BIN)/python -m tests.bench.decode --json docs/bench-decode.json $(ARGS)

bench-quality: $(TEST_ENV)  ## KL, agreement, perplexity, bits, seconds and memory of checkpoints; ARGS="--only mxfp4 --windows 8"
	@$(BIN)/python -m tests.bench.quality --json docs/bench-quality.json --plot docs/bench-quality.svg $(ARGS)

bench-scaling: $(TEST_ENV)  ## one process beside Ray nodes of this machine, and a model of more; ARGS="--nodes 1,2,4,8"
	@$(BIN)/python -m tests.bench.scaling --json docs/bench-scaling.json --plot docs/bench-scaling.svg $(ARGS)

gate-simulations: $(TEST_ENV)  ## how often the gate errs where the truth is known, in minutes; ARGS="--runs 1000"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.gate $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.endpoints $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.promises $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.reused_launches $(ARGS)

bench-devices: $(TEST_ENV)  ## one, two and more GPUs of this host; ARGS="--shape 70b --counts 4"
	@$(BIN)/python -m tests.bench.devices $(ARGS)

bench-deepseek: $(TEST_ENV)  ## DeepSeek R1's shape from FP8 blocks, beside cp and the disk; ARGS="--source /dev/shm/r1 --out /data/r1"
	@$(BIN)/python -m tests.bench.deepseek $(ARGS)

bench-experts: $(TEST_ENV)  ## GPTQ of a layer's experts, one after the other and side by side; ARGS="--device cuda:0"
	@$(BIN)/python -m tests.bench.experts $(ARGS)

zoo: $(TEST_ENV)  ## quantize 165 tiny models of as many architectures in seven ways, and write docs/models.md
	@$(BIN)/python -m tests.zoo.matrix --jobs 2 --json build/zoo.json $(ARGS)
	@$(BIN)/python -m tests.zoo.page build/zoo.json

trap: $(TEST_ENV) serving  ## twelve faults that must be stopped, sound checkpoints that must not, and the table in docs/gate.md
	@$(BIN)/python -m tests.trap.run --write $(ARGS)

mutation: $(TEST_ENV)  ## change 100 places of the product by a seed, and list those that no test notices (hours)
	@$(BIN)/python -m tests.tools.mutation --jobs 2 --json build/mutation.json $(ARGS)

walk: $(TEST_ENV)  ## from a FAIL in four bits to a release on SmolLM2, by what is printed; most of an hour on two cores
	@QUANTMINT_WALK=1 $(BIN)/python -m pytest -s -k smollm2 tests/e2e/test_from_fail_to_pass.py $(ARGS)

soak: $(TEST_ENV)  ## 200 rounds of a recipe, most of them killed: what is left of them; ARGS="--rounds 20"
	@$(BIN)/python -m tests.bench.soak --json docs/soak.json $(ARGS)

bench-memory-fit: $(TEST_ENV)  ## the KV cache that plans predict beside the one that vLLM makes, on this GPU and CPU
	@QUANTMINT_MEMORY_FIT=$${QUANTMINT_MEMORY_FIT:-memory-fit.jsonl} $(BIN)/python -m pytest -q -s \
	  tests/gpu/test_memory_fit.py tests/serving/planning/test_memory_real_vllm.py $(ARGS)

bench-throughput: $(TEST_ENV)  ## served beside bf16 on this GPU: ratios over fresh launches; ARGS="--hardware mi300x"
	@$(BIN)/python -m tests.bench.throughput $(ARGS)

clean:  ## remove the store and what was published to ./published
	rm -rf store published

distclean: clean  ## ... and the environments
	rm -rf .venv .venv-vllm *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The serving environment: vLLM's pins clash with ours, so it lives apart. Returns at once when it is there.
# Only after our own has its PyTorch, which pip then finds in its cache: nothing large is fetched twice.
serving: | $(TORCH_ENV)
	@[ -n "$$QUANTMINT_VLLM" ] || $(BIN)/python -m quantmint.pipeline.serving.install --venv .venv-vllm --backend $(BACKEND)

browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get -qq update && apt-get -qq -y install chromium chromium-driver >/dev/null; } \
	  || echo "note: no chromium with chromedriver here; the browser tests will be skipped" >&2

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("quantmint needs Python 3.11 or newer, found " + sys.version) if sys.version_info < (3, 11) else None'
	@echo "creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)

$(TORCH_ENV): pyproject.toml | $(VENV)/bin/python
	@echo "installing PyTorch into $(VENV)" >&2
	@$(PIP) $(TORCH)
	@touch $@

$(RUN_ENV): $(TORCH_ENV)
	@echo "installing what quantizes and judges into $(VENV); this takes a few minutes the first time" >&2
	@$(PIP) --editable '.[all]'
	@touch $@

# At one go with what it needs of the above, which pip would otherwise work out twice.
$(TEST_ENV): $(TORCH_ENV)
	@echo "installing everything, the test tools and the libraries that serve as oracles into $(VENV)" >&2
	@$(PIP) --editable '.[test]'
	@touch $(RUN_ENV) $@
