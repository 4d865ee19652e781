# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2

.PHONY: test demo docs test-slow test-integrations lint types unit format setup clean

test: lint types unit

setup: $(READY)

# Trains on the digits that come with scikit-learn, to epsilon 3; needs no data and no network once set up.
# One thread: the model is so small that several would only wait for each other.
demo: $(READY)
	$(BIN)/sluice train --dataset digits --method dpsr-cg --epsilon 3 --threads 1

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "sluice needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

# The libraries that Sluice trains inside of are heavy, so they have an environment of their own.
test-integrations:
	test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[data,integrations]' hypothesis pytest
	.venv-integrations/bin/python -m pytest tests/integrations tests/data/test_forms.py tests/data/test_targets.py

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

# The site, with broken links refused; build/site/index.html can be opened as a file.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-integrations .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
