# Every target makes the virtual environment it needs, and makes it again only when pyproject.toml changes.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough, unless PYTHON= names one.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $p)))
# What pytest is given besides: make test PYTEST_ARGS='tests/chat -k prompt'
# Three processes, whose maths keep to one core each: a third of the time of two is waiting.
PYTEST_ARGS ?= -n 3

# The tests' real SGLang lives in the user's cache, where a fresh checkout finds it again: one
# environment for each list of what it needs and each Python. AGENTRL_SGLANG_PYTHON names another.
CACHE := $(or $(AGENTRL_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/agentrl)
SGLANG_PYTHON ?= $(firstword $(foreach p,$(PYTHON) python3.13 python3.12 python3.11,\
	$(shell $p -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		2>/dev/null && echo $p)))
SGLANG_NEEDS := $(sort $(wildcard tests/sglang_cpu/*.txt))
SGLANG := $(CACHE)/sglang-$(firstword $(shell \
	{ cat $(SGLANG_NEEDS); $(SGLANG_PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)'; } | cksum))
AGENTS := $(CACHE)/agents-$(firstword $(shell \
	{ cat tests/gateway/packages/requirements.txt; $(PYTHON) -c 'import sys; print(sys.version)'; } | cksum))
# Packages of other projects' environments (agentrl/doors), each list in a Python of its own.
DOORS := $(CACHE)/test-doors-$(firstword $(shell \
	{ cat tests/doors/packages/*.txt; $(PYTHON) -c 'import sys; print(sys.version)'; } | cksum))
# verl's versions (tests/compat/packages), which verl's numbers and agentrl/config/verl_defaults.csv are from.
VERL := $(CACHE)/verl-$(firstword $(shell \
	{ cat tests/compat/packages/*.txt; $(PYTHON) -c 'import sys; print(sys.version)'; } | cksum))
VERL_VERSIONS := $(patsubst tests/compat/packages/%.txt,%,$(wildcard tests/compat/packages/[0-9]*.txt))
# Harbor and NeMo Gym need a newer Python than agentrl.
DOORS_PYTHON ?= $(firstword $(foreach p,python3.14 python3.13 python3.12 $(PYTHON),\
	$(shell $p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $p)))
SGLANG_READY := $(if $(AGENTRL_SGLANG_PYTHON),,$(if $(filter Linux,$(shell uname)),sglang))

# What SGLang does not import is never compiled; what it does, once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-vllm test-trackers test-doors test-verl recipes-check check lint format setup sglang agents doors quick-doors verl verl-keys docs site dist models

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

demo: $(VENV)/.installed  ## a policy learns to use a calculator: minutes on two CPU cores
	$(BIN)/agentrl train --dataset datasets/arithmetic_train.parquet --val-dataset datasets/arithmetic_val.parquet --model tiny --output runs/demo

test: setup  ## the tests, all but `slow`, `doors`, `gpu`, `verl`, `vllm` and `trackers`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not doors and not gpu and not verl and not vllm and not trackers" $(PYTEST_ARGS)

test-all: setup doors verl  ## the tests, all but `gpu`, `vllm` and `trackers`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not vllm and not trackers" --hypothesis-profile=thorough $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-vllm: $(VENV)/.installed-dev  ## the tests that need vLLM: AGENTRL_VLLM_PYTHON, or .venv-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

test-trackers: $(VENV)/.installed-dev  ## the tests that need the trackers, which it installs
	$(BIN)/python -m pip install -q mlflow-skinny sqlalchemy alembic trackio wandb swanlab comet_ml aim
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m trackers $(PYTEST_ARGS)

test-doors: setup doors  ## the tests of the doors to other projects' environments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/doors $(PYTEST_ARGS)

test-verl: $(VENV)/.installed-dev verl  ## the tests that compare with verl's own code, several versions of it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m verl tests/compat $(PYTEST_ARGS)

recipes-check: $(VENV)/.installed-dev  ## rewards, masks, advantages and updates of the recipes' stored runs, computed again
	OMP_NUM_THREADS=1 $(BIN)/python recipes/check.py --weights

check: lint  ## lint, format and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads 2

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev  ## ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed-dev $(SGLANG_READY) agents quick-doors  ## what the tests need: .venv, SGLang for a CPU, agent packages, games

sglang: $(SGLANG)/.installed  ## SGLang for a CPU: .venv-sglang, a link into the user's cache
	@ln -sfn $(SGLANG) .venv-sglang

agents: $(AGENTS)/.installed  ## packages of agents: .venv-agents, a link into the user's cache
	@ln -sfn $(AGENTS) .venv-agents

quick-doors: $(DOORS)/games/.installed
	@ln -sfn $(DOORS) .venv-doors

doors: quick-doors $(patsubst tests/doors/packages/%.txt,$(DOORS)/%/.installed,$(wildcard tests/doors/packages/*.txt))  ## packages of environments: .venv-doors, a link into the user's cache

verl: $(VERL)/.installed  ## verl's versions: .venv-verl, a link into the user's cache
	@ln -sfn $(VERL) .venv-verl

verl-keys: $(VENV)/.installed-dev verl  ## verl's keys and defaults, from verl's own files
	PYTHONPATH=tests $(BIN)/python -m support.verl_defaults

docs: $(VENV)/.installed-dev  ## the documentation that is written by a program
	PYTHONPATH=tests $(BIN)/python -m support.config_page > docs/config.md
	PYTHONPATH=tests $(BIN)/python -m support.tokens_page
	PYTHONPATH=tests $(BIN)/python -m support.parsers_page
	PYTHONPATH=tests $(BIN)/python -m support.doors_page
	PYTHONPATH=tests $(BIN)/python -m support.agents_page
	$(BIN)/python site/pages.py

site: $(VENV)/.installed-dev  ## the documentation's site: build/site
	$(BIN)/python site/build.py build/site

dist: $(VENV)/.installed  ## the wheel and the source archive in dist/, checked and tried in an environment of their own
	$(BIN)/python -m pip install --quiet --editable ".[release]"
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	PATH="$(CURDIR)/$(BIN):$$PATH" SBOM=dist/sbom.json deploy/try_wheel.sh dist/*.whl

models: $(VENV)/.installed-dev  ## the tables of benchmarks/models.md about rows and the local engine
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.models_page

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "agentrl needs Python 3.11 or later with its venv module" \
		"(Debian: apt-get install python3-venv). Name one with: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "installing agentrl and what it needs into $(VENV) (some minutes, once)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml
	@echo "installing agentrl and what its tests need into $(VENV) (some minutes, once)"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(AGENTS)/.installed:
	@echo "installing packages of agents into $(AGENTS) (300 MB, a minute, once)"
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --no-compile -r tests/gateway/packages/requirements.txt
	@touch $@

# NeMo Gym asks for a patch release of Python 3.13 that few machines have, and runs on others.
$(DOORS)/%/.installed:
	@test -n "$(if $(filter harbor nemo-gym,$*),$(DOORS_PYTHON),$(PYTHON))" || { echo \
		"Harbor and NeMo Gym need Python 3.12 or later; name one with: make DOORS_PYTHON=..."; exit 1; }
	@echo "installing the packages of tests/doors/packages/$*.txt into $(DOORS)/$* (a minute, once)"
	$(if $(filter harbor nemo-gym,$*),$(DOORS_PYTHON),$(PYTHON)) -m venv $(DOORS)/$*
	$(DOORS)/$*/bin/python -m pip install --quiet --no-compile \
		$(if $(filter nemo-gym,$*),--ignore-requires-python) -r tests/doors/packages/$*.txt
	@touch $@

$(VERL)/.installed:
	@echo "installing the packages of verl into $(VERL) (1.5 GB, some minutes, once)"
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --no-compile -r tests/compat/packages/requirements.txt
	for v in $(VERL_VERSIONS); do $(VERL)/bin/python -m pip install --quiet --no-compile --no-deps \
		--target $(VERL)/$$v -r tests/compat/packages/$$v.txt || exit 1; done
	@touch $@

# SGLang pins torch exactly, and without a GPU it wants only a part of what it names.
$(SGLANG)/.installed:
	@test -n "$(SGLANG_PYTHON)" || { echo "SGLang needs Python 3.11, 3.12 or 3.13; name one with:" \
		"make SGLANG_PYTHON=... (or AGENTRL_SGLANG_PYTHON=, of an environment that has it)"; exit 1; }
	@echo "installing SGLang for a CPU into $(SGLANG) (2.4 GB, some minutes, once)"
	$(SGLANG_PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-compile -r tests/sglang_cpu/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-compile --no-deps -r tests/sglang_cpu/bare.txt
	@touch $@
