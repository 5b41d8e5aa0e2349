# Two commands: `make demo` and `make test`. Each sets up its own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-gpu fuzz docs lint types unit clean

demo: $(READY)
	$(BIN)/fedgma run --out runs
	$(BIN)/fedgma report runs --out report

test: lint types unit

# with the long ones
test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not gpu"

# what needs a GPU, by any Python that has torch, triton and pytest: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
test-gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest -m gpu tests/*/test_gpu_*.py

# every parser of files and messages, guided by coverage: make fuzz SECONDS_EACH=60
SECONDS_EACH ?= 60
fuzz: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python benchmarks/faults/fuzz/fuzz.py --seconds $(SECONDS_EACH)

# the documentation as a site, in site/
docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	$(BIN)/mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not gpu"

# torch goes in first and alone, so that nothing that depends on it can pull another build
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[sim,fast,hub,flower,dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache runs report
