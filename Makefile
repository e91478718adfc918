# make demo: train three small models on digits and compare them. make test: lint, types and tests.
# make docs: the site, in site/index.html. make lowest: the tests with the oldest releases that we claim to work with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

LOWEST := .venv-lowest

.PHONY: demo test lint types docs tests lowest format clean

demo: $(READY)
	$(BIN)/quickvit demo --out demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Without the notice about the successor of the theme. Not --quiet: warnings would not count then.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tests: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu"

# Old releases warn of what newer ones have changed.
lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST) --resolution lowest-direct --editable ".[dev]"
	$(LOWEST)/bin/python -m pytest -m "not slow and not gpu" -W ignore

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) .mypy_cache .ruff_cache .pytest_cache demo site
