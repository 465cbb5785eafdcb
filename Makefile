# Everything runs in .venv, which `make setup` makes from the pinned CPU set.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPU_SET := torch==2.13.0 torchrec==1.8.0
# On Linux, PyPI has the CUDA build of torch, and PyTorch's own index the CPU build. Where that index
# cannot be reached, or TORCH_INDEX is set, pip takes torch from where it is told.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s),Linux)
ASK := import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)
TORCH_INDEX ?= $(shell timeout 8 $(PYTHON) -c '$(ASK)' 2>/dev/null \
  && echo "--extra-index-url $(CPU_INDEX)" \
  || echo "$(CPU_INDEX) cannot be reached: torch comes from pip's usual index" >&2)
endif

# As many tests at a time as there are cores, at most 4; those of a file on the same one.
TESTERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))
# With bytecode kept, wherever make is called: or each process compiles all tests and modules anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-fast test-nightly matrix-page matrix docs check clean

setup: $(VENV)/.installed

# The framework, every plugin in plugins/, and what depends on them all.
PARTS := . $(patsubst %/,%,$(dir $(wildcard plugins/*/pyproject.toml)))

$(VENV)/.installed: $(addsuffix /pyproject.toml,$(PARTS)) $(wildcard packaging/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "recd-plugins needs Python 3.11 to 3.14; try: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX) $(firstword $(CPU_SET))
	$(BIN)/python -m pip install --quiet $(CPU_SET) ./packaging/fbgemm-gpu -e '.[dev]' \
	  $(addprefix -e ./,$(filter-out .,$(PARTS)))
	$(BIN)/python -m pip check
	@touch $@

demo: setup
	$(BIN)/recd run registry.yaml --compare

# Of much that is alike a part, another one each day: CONTRIBUTING.md says how.
test: setup
	$(PYTEST)

# What a change needs while working: all but whole runs and matrices.
test-fast: setup
	$(PYTEST) -m "not slow"

# All of every matrix, and property tests with 20 times the examples, others each time.
test-nightly: setup
	$(PYTEST) --hypothesis-profile=nightly --timeout=3600

# Run every cell of the matrix of drop-in and write build/exactness_matrix.md; fail if one trains differently in silence.
# Goes on where it was stopped; rm build/matrix.jsonl begins anew.
matrix-page: setup
	@mkdir -p build
	$(BIN)/python -m tests.drop_in.matrix --keep build/matrix.jsonl --write build/exactness_matrix.md

# What holds this package to TorchRec, on every set of torch, FBGEMM and TorchRec that it takes, each
# in an environment of its own in build/torchrec. Goes on where it was stopped; AGAIN=--again runs the
# tests anew, VERSIONS="1.6 1.9" takes those alone, MATRIX="--all-cells" the whole matrix of drop-in.
matrix: setup
	$(BIN)/python -m tests.torchrec_versions $(VERSIONS) $(AGAIN) $(MATRIX) --workers $(TESTERS) --pip="$(TORCH_INDEX)"

# The site of the documentation, in build/site: open build/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) .data build/site .mypy_cache .pytest_cache .ruff_cache .hypothesis
