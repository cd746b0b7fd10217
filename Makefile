# Everything runs in .venv, which is made from pyproject.toml and constraints.txt alone.
#   make demo DEMO="--density 0.01 --epochs 5"        arguments of the demo
#   make wheels                                       dist/: sdist and wheels (x86-64, aarch64, any), as a release has them
#   make test PIP="--extra-index-url https://download.pytorch.org/whl/cpu"   Linux without a GPU: a much smaller download
PYTHON ?= python3
PIP ?=
DEMO ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Two workers on two cores: one thread each, or they fight for the cores.
export OMP_NUM_THREADS := 1

# Some images forbid Python to keep what it has compiled. Each process would then compile torch and Lightning anew when it
# starts (24 s instead of 9 on two slow cores), and tests start hundreds.
export PYTHONDONTWRITEBYTECODE :=

# Minutes of processor time that the tests of a tier may take (tests/budget.py): more than they do on a busy machine.
QUICK := 13
SLOW := 50
PYTEST := $(BIN)/python -m pytest --durations=10

.PHONY: help demo test lint slow docs wheels clean

help:
	@echo "make demo     sets up .venv and runs the main job (a few minutes)"
	@echo "make test     the quick tests"
	@echo "make lint     ruff and mypy"
	@echo "make slow     trainings of every system, launchers, links, a browser"
	@echo "make docs     the documents as a site, in build/site, and their tests"
	@echo "make wheels   dist/: sdist and wheels"
	@echo "make clean    removes what these have made"

demo: $(STAMP)
	$(BIN)/safusion demo $(DEMO)

test: $(STAMP)
	$(PYTEST) -m "not slow" -n 3 --budget $(QUICK)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests that measure time run alone, the rest side by side: some of them wait for timers and links.
ALONE := tests/e2e/test_noct.py
slow: $(STAMP)
	$(PYTEST) -m slow -n 3 $(ALONE:%=--deselect=%) --budget $(SLOW)
	$(PYTEST) -m slow $(ALONE)

# The documents as a site, in build/site; and their links, commands, YAML files and snippets.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/documents tests/contributing tests/test_system_tables.py -n 3

# aarch64 needs a cross compiler (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross).
wheels: $(STAMP)
	$(BIN)/python scripts/build_wheels.py

# --no-compile: a minute for what is compiled anyway when it is imported first
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard lightning_safusion/kernels/cpu/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable ".[test]" --constraint constraints.txt $(PIP)
	touch $@

clean:
	rm -rf $(VENV) safusion_demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
