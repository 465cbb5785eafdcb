# Everything runs in .venv, which `make setup` makes from the pinned CPU set.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPU_SET := torch==2.13.0 torchrec==1.8.0
# The CPU build of torch is on PyPI for macOS and Windows; Linux takes it from PyTorch's own index.
TORCH_INDEX ?=

.PHONY: setup demo test check clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml packaging/fbgemm-gpu/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "recd-plugins needs Python 3.11 or newer; try: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX) $(CPU_SET) ./packaging/fbgemm-gpu -e '.[dev]'
	$(BIN)/python -m pip check
	@touch $@

demo: setup
	$(BIN)/recd run registry.yaml --compare

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .data .mypy_cache .pytest_cache .ruff_cache .hypothesis
