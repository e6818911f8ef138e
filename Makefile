# make run starts Hydra, make test checks it. Everything Python lives in .venv; nothing is installed twice.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: run test soak lint peer bench clean system-packages

PYTHON ?= python3
TEST_WORKERS ?= 2
BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --require-hashes

run: $(STAMPS)/llama $(STAMPS)/run
	@exec $(BIN)/python manage.py up

test: system-packages lint $(STAMPS)/llama
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

soak: system-packages $(STAMPS)/dev $(STAMPS)/llama peer
	$(BIN)/python -m pytest -m soak

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python manage.py check
	$(BIN)/python manage.py makemigrations --check --dry-run

# llama-server and its benches, from the source that the pinned bindings carry.
peer: $(STAMPS)/venv
	@$(BIN)/python -m native.build_peer requirements/llama.txt build/peer

# Measures what users get: the library that a start builds for this CPU, made once.
bench: peer $(STAMPS)/llama $(STAMPS)/run
	$(BIN)/python manage.py build-native --arch cpu
	$(BIN)/python -m bench engine
	$(BIN)/python -m bench prefix

# Leaves HYDRA_HOME alone; pip's own cache keeps the llama.cpp build.
clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

system-packages:
	@missing=""; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v setpriv >/dev/null || missing="$$missing util-linux"; \
	command -v c++ >/dev/null || missing="$$missing build-essential"; \
	[ -z "$$missing" ] || { echo "Hydra's tests need packages of the system: apt install$$missing" >&2; exit 1; }

# A stamp is newer than the lock file it was made from, or the step is done again.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Hydra needs Python 3.11 or newer as $(PYTHON); name another one with: make PYTHON=python3.12 run" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv >/dev/null || \
		{ rm -rf .venv; echo "Hydra needs Python's venv module: apt install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run $(STAMPS)/dev: $(STAMPS)/%: requirements/%.txt | $(STAMPS)/venv
	@echo "installing Python packages ($<)"
	@$(INSTALL) -r $<
	@touch $@

$(STAMPS)/llama: requirements/llama.txt native/build_progress.py | $(STAMPS)/venv
	@$(BIN)/python native/build_progress.py $< .venv/llama-build.log
	@touch $@
