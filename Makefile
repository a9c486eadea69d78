# Two commands are enough: `make train` and `make test`. Each creates the virtual environment that it needs.
PYTHON ?= python3
# `make test TORCH=2.15.0` (train, fast, horovod too) uses that torch, and what matches it, in a separate virtual environment.
TORCH  ?=
# Neither Ray nor Open MPI quotes its own path. If this path has a space, the environments are elsewhere, and .venv is a link.
CACHE  := $(or $(XDG_CACHE_HOME),$(HOME:%=%/.cache))
SUM     = $(firstword $(shell pwd | cksum))
AWAY   := $(if $(word 2,$(CURDIR)),$(if $(filter 1,$(words $(CACHE))),$(CACHE)/raydist/$(SUM),/tmp/raydist-$(shell id -u)-$(SUM)))
VENV   ?= $(AWAY:%=%/).venv$(if $(TORCH),-torch-$(TORCH))
# Two test files run at a time, on two cores: three take as long. JOBS=0: one after another.
JOBS   ?= 2
# What `make test` does before the tests.
CHECKS ?= lint types
# A file of versions that replaces a site's constraints, which pip obeys otherwise. No absolute path: pip splits at spaces.
PINS   ?= $(if $(TORCH),$(VENV).txt)
BIN    := $(VENV)/bin
OLDEST  = $(if $(filter file,$(origin PYTHON)),$(shell python3.10 -c 'print("python3.10")' 2>/dev/null || echo $(PYTHON)),$(PYTHON))
RUN    := $(BIN)/python -m
TESTS  := pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
# With it every worker of every session of tests would compile all tests again, which takes 7 s of CPU.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(if $(PINS),PIP_CONSTRAINT=$(PINS)) $(BIN)/python -m pip install --quiet

.PHONY: help train test test-all coverage checks horovod-or-not lint types fast lowest matrix docs horovod bench gpu fake-gpu image rig clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# While pip works, .begun exists and .installed does not: an interrupted install is repeated from the beginning.
ifneq ($(AWAY),)
$(AWAY):
	@echo "Ray can't be started from a path with a space, as $(CURDIR): the packages go to $@"
	@mkdir -p -m 700 $@ && [ -O $@ ]
endif

$(VENV)/.installed: pyproject.toml $(PINS) | $(AWAY)
	@$(if $(AWAY),ln -sfn $(VENV) $(notdir $(VENV)))
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/.begun),--clear) $(VENV)
	@touch $(VENV)/.begun
	$(PIP) --editable .
	@mv $(VENV)/.begun $@

$(VENV)/.tested: $(VENV)/.installed
	@mv $(VENV)/.installed $(VENV)/.begun
	$(PIP) --editable '.[test]'
	# in a folder of its own: its mpirun would replace Open MPI's; its tests are skipped without it
	-$(PIP) --no-deps --ignore-installed --prefix $(VENV)/mpich mpich==5.0.2
	@mv $(VENV)/.begun $(VENV)/.installed && touch $@

$(VENV).txt: | $(AWAY)
	@echo torch==$(TORCH) >$@

train: $(VENV)/.installed  ## install, then train the main job on this machine: WORDS="train.epochs=3 scale=1x4"
	$(RUN) raydist.train $(WORDS)

test: checks  ## install, lint, types, the tests that are not slow: ten minutes on two cores
	$(RUN) $(TESTS) -m "not slow"

test-all: test  ## the same, then the slow tests: what CI runs
	$(RUN) $(TESTS) -m slow

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
# Each process writes what it ran when it ends, which takes a while: a few tests then see another rank end first. What
# fails is the concern of `make test`; here only the floor of pyproject.toml decides.
coverage: $(VENV)/.tested  ## what the tests that are not slow run of raydist, in drivers, fork servers and ranks
	-$(RUN) coverage run -m $(TESTS) -m "not slow"
	$(RUN) coverage combine --quiet
	$(RUN) coverage report

# Horovod is built (3 minutes, then from a cache) on one core while mypy runs on the other.
checks: $(filter lint,$(CHECKS))
	$(MAKE) --no-print-directory --jobs=2 $(filter types,$(CHECKS)) horovod-or-not

horovod-or-not: $(VENV)/.tested
	$(RUN) raydist.tools.horovod build || [ $$? = 2 ]  # 2: it has printed what this machine lacks, and its tests are skipped

lint: $(VENV)/.tested  ## ruff
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(VENV)/.tested  ## mypy, strict
	$(RUN) mypy

fast: $(VENV)/.tested  ## the tests that need neither Ray nor root
	$(RUN) pytest -m "not ray and not root"

lowest:  ## the main job and the fast tests with the lowest versions that pyproject.toml admits, on Python 3.10 if it exists
	$(MAKE) train fast VENV=$(AWAY:%=%/).venv-lowest PINS=tests/lowest.txt TORCH= PYTHON="$(OLDEST)"

matrix:  ## make test on each Python of this machine, 3.10 to 3.13, with the newest and the lowest torch: WORDS="3.10 3.13:2.8.0"
	$(PYTHON) -m tests.matrix $(WORDS)

docs: $(VENV)/.installed  ## the documentation as a site, in build/site; a broken link is an error
	$(PIP) --editable '.[docs]'
	$(RUN) mkdocs build --quiet --strict

horovod: $(VENV)/.installed  ## build Horovod for the torch that is installed (3 minutes once, then from a cache)
	$(RUN) raydist.tools.horovod build

bench: $(VENV)/.installed  ## the figures of bench/README.md, side by side with Ray Train and torchrun
	$(PIP) --editable '.[bench]'
	$(RUN) bench

gpu: $(VENV)/.tested  ## tests, figures and network of this machine's GPUs, one report: gpu-report.md (docs/gpu.md)
	$(PIP) --editable '.[bench]'
	$(RUN) bench gpu

fake-gpu: $(VENV)/.tested  ## make gpu on 1, 4 and 8 GPUs that compute nothing (gcc and a CUDA build of torch; half an hour)
	RAYDIST_FAKE_GPU=1 $(RUN) pytest -rP tests/fake_gpu/test_make_gpu.py

image: $(VENV)/.tested  ## build the image of deploy/docker and run it on two hosts (root, podman, 16 GB below /var/tmp)
	RAYDIST_IMAGE=1 $(RUN) pytest tests/deploy/test_image.py

rig: $(VENV)/.tested  ## three hosts with Ray on this machine, and a shell on the first (needs root)
	$(RUN) tests.rig 3

clean:  ## remove what was built
	rm -rf $(VENV) $(AWAY) .coverage* .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
