# On a fresh machine `make demo` and `make test` are all there is to run; both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test test-all test-versions test-integrations lint format docs docs-site bench release clean

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

# glibc would return the working memory of a program after each run (docs/performance.md); CPU torch has the same setting.
KEEP_MEMORY := MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592

demo: venv ## train a small GPT in every mode beside CPU torch: a table, and build/demo.svg
	$(KEEP_MEMORY) $(BIN)/python examples/demo.py

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

# An environment of its own beside .venv, whose packages it sees: these libraries want others that nobody needs here.
LIBRARIES := build/libraries/bin/python
test-integrations: venv ## real libraries (gigabytes) against CPU torch, into docs/libraries.md
	test -x $(LIBRARIES) || $(BIN)/python -m venv --system-site-packages build/libraries
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > build/libraries/shared
	cp build/libraries/shared $$($(LIBRARIES) -c 'import site; print(site.getsitepackages()[0])')/shared.pth
	$(BIN)/python -m pip freeze --exclude-editable > build/libraries/constraints.txt
	$(LIBRARIES) -m pip install --quiet -c build/libraries/constraints.txt -r tests/integrations/requirements.txt
	$(LIBRARIES) -m pytest tests/integrations
	$(LIBRARIES) -m tests.integrations.try_libraries

docs: venv ## write docs/ops.md from the registry and docs/settings.md from the settings
	$(BIN)/python docs/make_ops.py
	$(BIN)/python docs/make_settings.py

DOCS := build/docs-venv

$(DOCS)/.installed: docs/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r docs/requirements.txt
	touch $@

docs-site: $(DOCS)/.installed ## build the pages of docs/ with the API into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

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
