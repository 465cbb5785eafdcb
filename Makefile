# Everything runs in .venv, which `make setup` creates with the pinned CPU packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPU_SET := torch==2.13.0 torchrec==1.8.0
# On Linux, PyPI has the CUDA build of torch and PyTorch's index the CPU build. If that index cannot
# be reached, or TORCH_INDEX is set, pip uses the given index.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s),Linux)
ASK := import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)
TORCH_INDEX ?= $(shell timeout 8 $(PYTHON) -c '$(ASK)' 2>/dev/null \
  && echo "--extra-index-url $(CPU_INDEX)" \
  || echo "$(CPU_INDEX) cannot be reached: torch comes from pip's usual index" >&2)
endif

# One test worker more than cores, as ranks and readers wait for each other; at most 4. Tests of a
# file share a worker.
TESTERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))
# Keep bytecode, or each process compiles all modules again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-fast test-nightly matrix-page matrix docs check clean

setup: $(VENV)/.installed

# The framework, every plugin in plugins/, and the package that depends on all of them.
PARTS := . $(patsubst %/,%,$(dir $(wildcard plugins/*/pyproject.toml)))

# All packages are built with the same hatchling, as a build environment for each takes seconds.
$(VENV)/.installed: $(addsuffix /pyproject.toml,$(PARTS)) $(wildcard packaging/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "recd-plugins needs Python 3.11 to 3.14; try: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip hatchling editables
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH_INDEX) $(firstword $(CPU_SET))
	@# Compiles torch to bytecode on another core.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import torch._dynamo, torch.distributed.checkpoint' 2>/dev/null &
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation $(CPU_SET) ./packaging/fbgemm-gpu -e '.[dev]' \
	  $(addprefix -e ./,$(filter-out .,$(PARTS)))
	$(BIN)/python -m pip check
	@touch $@

demo: setup
	$(BIN)/recd run registry.yaml --compare

# The CI suite. Matrices run pairwise cells; some files take turns by day (docs/dev/testing.md).
test: setup
	$(PYTEST)

# Unit tests: everything but whole runs and matrices.
test-fast: setup
	$(PYTEST) -m "not slow"

# Every cell of every matrix, and property tests with 20 times the examples.
test-nightly: setup
	$(PYTEST) --hypothesis-profile=nightly --timeout=3600

# Run every cell of the trainer matrix and write build/exactness_matrix.md. Fails if a cell trains
# differently without a message. Continues after an interruption; rm build/matrix.jsonl starts again.
matrix-page: setup
	@mkdir -p build
	$(BIN)/python -m tests.drop_in.matrix --keep build/matrix.jsonl --write build/exactness_matrix.md

# Run the parity tests on every supported set of torch, FBGEMM and TorchRec, each in its own
# environment in build/torchrec. Continues after an interruption; AGAIN=--again runs the tests again,
# VERSIONS="1.6 1.9" selects sets.
matrix: setup
	$(BIN)/python -m tests.torchrec_versions $(VERSIONS) $(AGAIN) --workers $(TESTERS) --pip="$(TORCH_INDEX)"

# Build the documentation site: open build/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) .data build/site .mypy_cache .pytest_cache .ruff_cache .hypothesis
