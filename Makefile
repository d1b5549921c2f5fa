# Each target sets up what it needs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
# Several math libraries start a thread per core in every process; the work here is many small processes.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint format clean

demo: .venv/demo.stamp  ## The main job: the same training tuned from slot 420 and from slot 583, and a picture of both.
	$(BIN)/python examples/pendulum/demo.py --out out/demo

test: .venv/dev.stamp  ## All tests that need no GPU; GPU tests are skipped by name.
	$(BIN)/python -m pytest

lint: .venv/dev.stamp  ## Format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/dev.stamp  ## Formats the sources in place.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Removes what the targets made.
	rm -rf .venv out build dist *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cotuned needs Python 3.11 or later; make PYTHON=python3.12 … names another one" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
