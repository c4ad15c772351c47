# Every target makes the virtual environment it needs, and makes it again only when pyproject.toml changes.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough, unless PYTHON= names one.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $p)))
# What pytest is given besides: make test PYTEST_ARGS='tests/test_chat.py -k prompt'
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu check lint format sglang docs

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

demo: $(VENV)/.installed  ## a policy learns to use a calculator: minutes on two CPU cores
	$(BIN)/agentrl train --dataset datasets/arithmetic_train.parquet --val-dataset datasets/arithmetic_val.parquet --model tiny --output runs/demo

test: $(VENV)/.installed-dev  ## the tests, all but `slow` and `gpu`
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev  ## the tests, all but `gpu`
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: lint  ## lint, format and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/pyright

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev  ## ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sglang: .venv-sglang/.installed  ## an environment with SGLang for a CPU, which its tests need

docs: $(VENV)/.installed-dev  ## the documentation that is written by a program
	$(BIN)/python -m agentrl.config.page > docs/config.md

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

# SGLang pins torch exactly, and without a GPU it wants only a part of what it names.
.venv-sglang/.installed: tests/sglang_cpu/requirements.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later; name one with: make PYTHON=..."; exit 1; }
	@echo "installing SGLang for a CPU into .venv-sglang (2.7 GB, some minutes, once)"
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet -r tests/sglang_cpu/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.18 xgrammar==0.2.1 \
		compressed-tensors torchvision==0.28.0
	@touch $@
