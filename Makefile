# All set-up happens here: each target that needs the virtual environment makes it first.
# Stamp files in .venv remember what is installed; a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types format docs pictures interface dist install clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.lab ## set up, then compare seven optimizers on scikit-learn's digits
	$(BIN)/ngplus compare digits
	$(BIN)/ngplus report runs/digits-small --out runs/digits.html

test: lint types ## set up, then run all checks: ruff, import-linter, mypy, the full test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev ## ruff: rules and formatting; import-linter: imports go one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev ## mypy, strict on src/ngplus
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## the documentation site in site/, strict: no broken links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html; with search: $(BIN)/python -m http.server --directory site"

pictures: $(VENV)/.dev ## draw the pictures of docs/ that are made from the code
	$(BIN)/python tools/method_pictures.py
	$(BIN)/python tools/valley_picture.py
	$(BIN)/python tools/theory_figures.py

interface: $(VENV)/.dev ## write tests/public_interface.txt anew, after a change that is meant
	$(BIN)/python tools/public_interface.py

dist: $(VENV)/.dev $(VENV)/.release ## wheel and sdist in dist/, checked; the core tests run from the wheel beside torch alone
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_release.py dist/*.whl

install: $(VENV)/.dev ## set up .venv with everything that development needs

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# torch first, by itself, so that nothing installed later can choose another build of it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "ngplus needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt hatchling editables
	@touch $@

# The build backend comes from constraints.txt too, hence no build isolation.
$(VENV)/.lab: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[lab]'
	@touch $@

$(VENV)/.release: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[release]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@ $(VENV)/.lab
