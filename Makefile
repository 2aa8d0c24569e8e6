# setup installs, demo runs the whole chain on the embedded family, test runs the tests, test-quick those that take a few
# seconds, durations records which are slow, lint the linters, docs writes the recipe reference;
# first-reply measures when drafting begins over each link; fuzz, fuzz-files and soak are the long endurance runs;
# host-bench times the device's work on the logits of a full pass beside a plain float64 reading, judgement-bench the
# verifier's judgement of a tree beside one on the host;
# attack measures what a neighbour of hostile callers feels;
# arm64 runs a bundle's consumer on emulated arm64: apt-get install qemu-user-static, and `hyco-export bundle` before.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

# two processes, a file's tests in one of them: what the file's tests share is built once
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile
ENDURANCE := $(VENV)/bin/python

.PHONY: setup demo test test-quick durations lint docs histories first-reply fuzz fuzz-files soak host-bench judgement-bench attack arm64 clean

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
	$(PYTEST)

test-quick: $(STAMP)
	$(PYTEST) -m "not slow"

# after tests were added, or became slower or faster: all of them, and a new tests/slow_tests.json
durations: $(STAMP)
	$(PYTEST) --record-durations

# random histories of clients and one engine, in the thousands
histories: $(STAMP)
	HYCO_HISTORIES=10000 $(VENV)/bin/python -m pytest --timeout 0 tests/endurance/test_histories.py

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
	$(ENDURANCE) -m tests.endurance.fuzz_chat

fuzz-files: $(STAMP)
	$(ENDURANCE) -m tests.endurance.fuzz_files

soak: $(STAMP)
	$(ENDURANCE) -m tests.endurance.soak

host-bench: $(STAMP)
	$(ENDURANCE) -m tests.endurance.host_bench

judgement-bench: $(STAMP)
	$(ENDURANCE) -m tests.endurance.judgement_bench

attack: $(STAMP)
	$(ENDURANCE) -m tests.endurance.attack

# packages and wheels for arm64 are fetched into ARM64; nothing else on the machine changes
ARM64 ?= /tmp/hyco-arm64
BUNDLE ?= bundle

arm64: $(STAMP)
	PYTHON=$(VENV)/bin/python tests/bundle/arm64.sh $(ARM64) $(BUNDLE)

clean:
	rm -rf $(VENV) runs
