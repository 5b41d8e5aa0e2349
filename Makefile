# Two commands: `make demo` and `make test`. Each sets up its own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := build/tools/bin
RELEASE := build/release
EVERY := build/every

.PHONY: demo test test-all test-gpu fuzz mutants audit sbom archive release docs lint types unit clean

demo: $(READY)
	$(BIN)/fedgma run --out runs
	$(BIN)/fedgma report runs --out report

test: lint types unit

# with the long ones, and those of packages that few users have: Ray, NVFlare, pfl-research, peft, trackers
test-all: lint types $(EVERY)/.ready
	OMP_NUM_THREADS=1 $(EVERY)/bin/python -m pytest -n auto --dist worksteal -m "not gpu"

$(EVERY)/.ready: pyproject.toml constraints.txt
	rm -rf $(EVERY)
	$(PYTHON) -m venv $(EVERY)
	$(EVERY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(EVERY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[sim,fast,hub,flower,nvflare,pfl,peft,ray,trackers,dev]' 'flwr[simulation]' flwr-datasets pandas
	touch $@

# what needs a GPU, by any Python that has torch, triton and pytest: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
test-gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest -m gpu tests/*/test_gpu_*.py

# small changes of the source that a test must notice; prints those that none does
mutants: $(READY)
	$(BIN)/python tools/mutants.py

# findings in the source, and advisories on the packages of a release; says plainly what it could not look up
audit: $(RELEASE)/.ready
	$(TOOLS)/python tools/audit.py $(RELEASE)

# the packages of a release with versions and licences, in dist/sbom.json
sbom: $(RELEASE)/.ready
	$(TOOLS)/python tools/sbom.py $(RELEASE) dist/sbom.json

# sdist and wheel in dist/, checked without a network, with their bill of materials; VERSION=1.2.3 writes the version first
release: $(RELEASE)/.ready
	$(TOOLS)/python tools/release.py dist $(RELEASE) $(VERSION)
	$(TOOLS)/python tools/sbom.py $(RELEASE) dist/sbom.json

# a clean environment with the package and the extras of a release, made by tools of their own
$(RELEASE)/.ready: pyproject.toml constraints.txt
	rm -rf build/tools $(RELEASE)
	$(PYTHON) -m venv build/tools
	$(TOOLS)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		bandit pip-audit cyclonedx-bom build hatchling numpy
	$(PYTHON) -m venv --without-pip $(RELEASE)
	$(TOOLS)/pip --python $(RELEASE) install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TOOLS)/pip --python $(RELEASE) install --quiet --disable-pip-version-check -c constraints.txt \
		'.[sim,fast,hub,flower]'
	touch $@

# the exported runs with plans, printed numbers, version, licence and checksums as one file in dist/, to be deposited
archive: $(READY)
	$(BIN)/python tools/archive.py

# every parser of files and messages, guided by coverage: make fuzz SECONDS_EACH=60
SECONDS_EACH ?= 60
fuzz: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python benchmarks/faults/fuzz/fuzz.py --seconds $(SECONDS_EACH)

# the documentation as a site, in site/; its examples are run
docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q docs README.md tests/test_docs.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# two processes check in half of the time, but give up (2) where a busy machine takes 3 s to start them: then one does it
types: $(READY)
	MYPY_NUM_WORKERS=2 $(BIN)/mypy || { test $$? -eq 2 && $(BIN)/mypy; }

# one process more than cores that it may use, because some tests wait for others
CORES := import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($$($(BIN)/python -c '$(CORES)') + 1)) \
		--dist worksteal -m "not slow and not gpu"

# torch goes in first and alone, so that nothing that depends on it can pull another build
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[sim,fast,hub,flower,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache runs report
