# From a clone to a server or a test run, with nothing but Python 3.11+ and its venv module.

PYTHON ?= python3
VENV ?= .venv
# More extras for `make test`, separated by commas: EXTRAS=reference,lint
EXTRAS ?=
MODEL ?= smollm2
PORT ?= 8000
# More arguments for the command that runs: make serve ARGS="--max-num-seqs 8"
ARGS ?=

comma := ,
space := $(subst ,, )
BIN := $(VENV)/bin
# A stamp per set of extras says that they are installed: the second run is instant.
TEST_STAMP := $(VENV)/.installed-$(subst $(space),-,$(strip $(subst $(comma),$(space),test $(EXTRAS))))

.PHONY: help serve pull test check lint format bench constraints clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 20

serve: $(VENV)/.installed-base ## Install, fetch MODEL (default smollm2) and serve it on PORT (default 8000)
	@$(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

pull: $(VENV)/.installed-base ## Install and fetch MODEL into the user's cache folder
	@$(BIN)/octavo pull $(MODEL)

test: $(TEST_STAMP) ## Install with EXTRAS, fetch the default model and run the tests
	@$(BIN)/octavo pull smollm2 || echo "Tests that need the default model will be skipped."
	$(BIN)/python -m pytest $(ARGS)

check: lint ## Check format, lint, types and the borders between packages
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: $(VENV)/.installed-lint ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.installed-lint ## Rewrite files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-base ## Run the benchmarks on the default model
	@$(BIN)/octavo pull smollm2
	$(BIN)/python benchmarks/prefix_reuse.py
	$(BIN)/python benchmarks/chunked_prefill.py

constraints: ## Pin the newest releases of all dependencies in constraints.txt
	rm -rf $(VENV)-pins
	$(PYTHON) -m venv $(VENV)-pins
	$(VENV)-pins/bin/python -m pip install --quiet -e '.[hub,test,reference,lint]'
	sed -n '/^#/p' constraints.txt > $(VENV)-pins/constraints.txt
	$(VENV)-pins/bin/python -m pip list --format freeze --exclude-editable --exclude pip \
		| grep -v -i -e '^nvidia' -e '^cuda' -e '^triton' | sed 's/+.*//' >> $(VENV)-pins/constraints.txt
	cp $(VENV)-pins/constraints.txt constraints.txt
	rm -rf $(VENV)-pins

clean: ## Remove the environment and all caches of this clone (not fetched models)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "Octavo needs Python 3.11 or newer: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Octavo needs Python 3.11 or newer; name one with: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed-base: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing Octavo and its dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing Octavo with $* into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[$(subst -,$(comma),$*)]'
	@touch $@
