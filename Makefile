# Each target makes its own environment: Python 3.11 or newer, make and a package index are all it takes.

PYTHON ?= python3
# The release that is tested; another that the project allows may be named here, such as one for a GPU.
TORCH ?= torch==2.13.0

.PHONY: serve test check clean

serve: .venv/installed
	.venv/bin/nearsense serve

test: .venv/installed
	.venv/bin/python -m pytest

check: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

clean:
	rm -rf .venv

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet "$(TORCH)"
	.venv/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
