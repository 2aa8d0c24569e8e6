# setup installs, demo runs the whole chain on the embedded family, test runs the tests, lint the linters, docs writes
# the recipe reference;
# first-reply measures when drafting begins over each link; fuzz, fuzz-files and soak are the long endurance runs;
# attack measures what a neighbour of hostile callers feels.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

ENDURANCE := $(VENV)/bin/python

.PHONY: setup demo test lint docs histories first-reply fuzz fuzz-files soak attack clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("hyco-export needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/hyco-export run

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2

# random histories of clients and one engine, in the thousands
histories: $(STAMP)
	HYCO_HISTORIES=10000 $(VENV)/bin/python -m pytest tests/endurance/test_histories.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# the recipe reference, made from the structs and the comments of the recipes
docs: $(STAMP)
	$(VENV)/bin/python -m tests.support.recipe_reference

first-reply: $(STAMP)
	$(ENDURANCE) -m tests.endurance.first_reply_times

fuzz: $(STAMP)
	$(ENDURANCE) -m tests.endurance.fuzz

fuzz-files: $(STAMP)
	$(ENDURANCE) -m tests.endurance.fuzz_files

soak: $(STAMP)
	$(ENDURANCE) -m tests.endurance.soak

attack: $(STAMP)
	$(ENDURANCE) -m tests.endurance.attack

clean:
	rm -rf $(VENV) runs
