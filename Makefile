# Two commands are enough: `make train` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m

.PHONY: help train test lint types fast horovod bench rig clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

train: $(VENV)/.installed  ## install, then train the main job on this machine: WORDS="train.epochs=3 scale=1x4"
	$(RUN) raydist.train $(WORDS)

test: lint types horovod  ## install, lint, types, all tests
	$(RUN) pytest

lint: $(VENV)/.tested  ## ruff
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(VENV)/.tested  ## mypy, strict
	$(RUN) mypy

fast: $(VENV)/.tested  ## the tests that need neither Ray nor root
	$(RUN) pytest -m "not ray and not root"

horovod: $(VENV)/.installed  ## build Horovod for the torch that is installed (3 minutes once, then from a cache)
	$(RUN) raydist.tools.horovod build

bench: $(VENV)/.installed  ## the figures of bench/README.md, side by side with Ray Train and torchrun
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(RUN) bench

rig: $(VENV)/.tested  ## three hosts with Ray on this machine, and a shell on the first (needs root)
	$(RUN) tests.rig 3

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
