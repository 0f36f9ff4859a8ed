# On a fresh machine `make demo` and `make test` are all there is to run; both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test test-all test-versions lint format docs bench release clean

help: ## say what the targets do
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(STAMP) ## install everything into .venv

# torch is named first and pinned, so that no later requirement can bring another build of it.
$(STAMP): pyproject.toml constraints.txt _isthmus_autoload.py _isthmus_command.py
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Isthmus needs Python 3.11 or newer, but $(PYTHON) is {v}; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: venv ## train a small GPT on device "jax"
	$(BIN)/python examples/char_gpt.py

lint: venv ## ruff, and mypy as strict as pyproject.toml says
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv ## rewrite the sources as ruff would
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A file stays with one process, which then finds most programs compiled: a fifth less time than with its tests dealt out.
test: venv ## the tests that are not slow, and a part of torch's databases
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' --samples 1

test-all: lint ## lint, then every test: torch's databases in full (build/conformance.json), numerics with XLA's optimiser
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pytest -n 2 -m numerics --xla-default

test-versions: ## other releases of torch and JAX, an environment each (gigabytes), into docs/versions.md
	$(PYTHON) tests/check_versions.py $(PAIRS)

docs: venv ## write docs/ops.md from the registry and docs/settings.md from the settings
	$(BIN)/python docs/make_ops.py
	$(BIN)/python docs/make_settings.py

bench: venv ## what importing, dispatching, crossing to JAX and compiled models cost
	-$(BIN)/python benchmarks/import.py
	-$(BIN)/python benchmarks/dispatch.py
	-$(BIN)/python benchmarks/first_call.py
	-$(BIN)/python benchmarks/interop.py
	$(BIN)/python benchmarks/compile.py

release: ## build sdist and wheel into dist/, check them, and try the wheel in an environment of its own
	$(PYTHON) tests/check_release.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
