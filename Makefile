# Each target sets up what it needs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
# Several math libraries start a thread per core in every process; the work here is many small processes.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

# CUDA of the GPU targets, 12 or 13: what the driver supports (nvidia-smi says).
CUDA ?= 13

# Without a package index: GPU_PYTHON=python3 takes an interpreter that has CuPy and pytest already. Then nothing is
# installed but this package and the wheels in .whl/, if there are any, into .site.
ifdef GPU_PYTHON
GPU_SET_UP := gpu-site
test-gpu bench-gpu: export PYTHONPATH := $(CURDIR)/.site$(if $(PYTHONPATH),:$(PYTHONPATH))
else
GPU_PYTHON := $(BIN)/python
GPU_SET_UP := .venv/gpu.stamp
endif

.PHONY: demo test test-gpu bench-gpu chaos fuzz lint format clean gpu-site

demo: .venv/demo.stamp  ## The main job: the same training tuned from slot 420 and from slot 583, and a picture of both.
	$(BIN)/python examples/pendulum/demo.py --out out/demo

test: .venv/dev.stamp  ## All tests that need no GPU; GPU tests are skipped by name.
	$(BIN)/python -m pytest

test-gpu: $(GPU_SET_UP)  ## All tests that need a GPU, then compute-sanitizer; logs in out/test-gpu. CUDA=12 or 13.
	PYTHON=$(GPU_PYTHON) tests/gpu_run.sh out/test-gpu

bench-gpu: $(GPU_SET_UP)  ## Kernels beside their limits and their rivals, then a daemon on a busy GPU; JSON in out/.
	$(GPU_PYTHON) -m benchmarks.bench_gpu
	$(GPU_PYTHON) -m benchmarks.bench_sharing

chaos: .venv/dev.stamp  ## A daemon under faults: killed, stopped, cut off, disk full …; ten minutes; out/chaos.json.
	$(BIN)/python -m tests.chaos

FUZZ_INPUTS ?= 1000000
fuzz: .venv/dev.stamp  ## Bad input at a daemon, a million times; out/fuzz.json. FUZZ_INPUTS=… for another number.
	$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS)

lint: .venv/dev.stamp  ## Format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/dev.stamp  ## Formats the sources in place.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Removes what the targets made.
	rm -rf .venv .site out build dist *.egg-info

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

.venv/gpu.stamp: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev,cuda$(CUDA)]'
	touch $@

SITE_PIP = $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .site
gpu-site:
	rm -rf .site build
	$(if $(wildcard .whl/*.whl),$(SITE_PIP) .whl/*.whl)
	$(SITE_PIP) --no-build-isolation .
