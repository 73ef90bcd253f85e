# Two commands for a newcomer: `make demo` and `make test`. `make check` is the whole gate.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-long check lint types stubs stubs-fresh test-triton test-gpu sim mutations oracles clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/forkpoint demo

# Two workers, or as many as WORKERS says ("": in one process); a file stays with one, so that its servers are started once.
# The longest files go first (tests/conftest.py).
WORKERS ?= 2
TEST := $(BIN)/python -m pytest -q $(if $(WORKERS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

test: $(VENV)/.dev
	$(TEST) -m 'not long'

# The tests that take longest (tests/long.py), which CI runs as well.
test-long: $(VENV)/.dev
	$(TEST) -m long

check: $(VENV)/.dev lint types stubs-fresh
	$(TEST) -m 'not long'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy -p forkpoint
	$(BIN)/mypy tests
	$(BIN)/pyright

stubs: $(VENV)/.dev
	$(BIN)/python -m tools.stubs

stubs-fresh: $(VENV)/.dev
	$(BIN)/python -m tools.stubs --check

# Triton is 640 MB, so it is not among the test packages.
test-triton: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'triton==3.6.0'
	$(BIN)/python -m pytest -q tests/triton

# On a machine with an H200: kernels at their limits, then the compute tests that the CPU runs too. WORKERS as above.
GPU_TESTS := tests/gpu tests/triton tests/model tests/engine tests/exactness

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(if $(WORKERS),-n $(WORKERS)) $(GPU_TESTS) --device cuda

# The session layer on a simulated store, SEEDS runs from FIRST on; a failing one is told by its seed.
SEEDS ?= 10000
FIRST ?= 0

sim: $(VENV)/.dev
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST)

# Every mistake of tests/mutations, put into the code one at a time; writes docs/mutations.md.
mutations: $(VENV)/.dev
	$(BIN)/python -m tests.mutations

# Our logits and those of mlx-lm (in an environment of its own, 355 MB) and of transformers, computed anew.
oracles: $(VENV)/.dev
	$(BIN)/python -m tests.oracles --venv .venv-mlx

clean:
	rm -rf $(VENV) build dist src/*.egg-info
