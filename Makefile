PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install run test lint bench docs clean

help: ## show what can be done here
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

# Nothing is installed again until a requirement changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 …"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes, once) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need …"
	@$(INSTALL) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## set up .venv

run: install ## serve the embedded model on 127.0.0.1:30000; ARGS="--proxy-port 31000" passes flags
	@$(BIN)/python run.py $(ARGS)

test: $(VENV)/.installed-dev ## run the tests; ARGS="-k stream" passes flags to pytest
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev ## measure every part beside its baseline (half an hour)
	@for part in serving sampling ledger judge learning swapping; do $(BIN)/python benchmarks/$$part.py || exit 1; done

docs: $(VENV)/.installed ## write the README's table of options anew
	@$(BIN)/python docs/generate.py

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
