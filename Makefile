# Starling's commands. Every target stands in a virtual environment of its own; `make install` builds it once.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The first interpreter that runs and is new enough; `make PYTHON=/path/to/python` overrides.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$each -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$each; break; }; done)

.PHONY: install lint check test clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Starling needs Python 3.11 or later: none was found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Everything that needs no real processes or sockets: minutes.
check: lint
	$(BIN)/python -m pytest -m "not real"

# The same and the tests on real processes and sockets, in one run.
test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
