# make              this list
# make install      .venv with flowrl and what its tests need; the other targets do so first. docs/install.md
#                   says its size, what a machine without a GPU can leave out, and how to do without make
# make quickstart   install, align the embedded model, show before and after
# make test         install, run the tests but the long ones: some minutes
# make long         the long tests, an hour; MARK=listed: those of tests/long.txt alone, as CI does
# make browser      the pages in Debian's Chromium: apt-get install chromium chromium-driver
# make real         the named models and rewards at their real sizes, on a CPU; 20 GB and hours
# make check        lint, types, spelling, budgets
# make docs         build the documentation into site/; its packages are installed once
# make lock         write requirements.lock anew: the newest versions that pyproject.toml allows, with hashes
# make lowest       test with the lowest versions that pyproject.toml allows
# make release      wheel, sdist, check for known vulnerabilities and list of parts, in dist/; needs the internet
PYTHON ?= python3
# What is installed, to the byte; LOCK= installs the newest versions that pyproject.toml allows.
LOCK ?= requirements.lock
BIN := .venv/bin
STAMP := .venv/.installed
DOCS := .venv/.docs
TOOLS := .venv-tools/bin
PYTEST_MORE ?=
MARK ?= long
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(PYTEST_MORE)
LOWEST := .venv-lowest
# Not those that compare digits, which newer libraries made.
LOWEST_TESTS ?= tests/cli tests/config tests/data tests/policy tests/samplers
COMPILE := $(TOOLS)/uv pip compile --quiet --no-header --no-annotate --extra dev pyproject.toml
TREE := .mypy_cache/tree/flowrl
# Other packages count as Any (reading torch's types takes a minute from cold), and optional record fields may be used without an assert.
MYPY := --follow-imports=skip --no-strict-optional --disable-error-code=var-annotated

# Bytecode is kept, or each process that a test starts would compile the package and each worker its tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install quickstart test long browser real check docs lock lowest release

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

install: $(STAMP)
	@echo "flowrl is $(BIN)/flowrl; to have it on PATH: . $(BIN)/activate; to remove it: rm -r .venv"

quickstart: $(STAMP)
	$(BIN)/flowrl train experiment=quickstart

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(PYTEST) -m "not long and not browser"

long: $(STAMP)
	HF_HUB_OFFLINE=1 $(PYTEST) -m $(MARK)

browser: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 0 -m browser tests/browser

real: $(STAMP)
	$(BIN)/python scripts/bench/real_size.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check flowrl samplers rewards configs scripts tests
	$(BIN)/codespell --ignore-regex "base64,[A-Za-z0-9+/=]*" flowrl samplers rewards configs scripts docs $(wildcard *.md) # tests misspell on purpose
	$(BIN)/python scripts/check_budgets.py
	@# samplers/ and rewards/ import as flowrl.samplers and flowrl.rewards: mypy sees the package as a wheel would hold it.
	@rm -rf $(TREE) && mkdir -p $(TREE) && ln -s $(CURDIR)/flowrl/* $(CURDIR)/samplers $(CURDIR)/rewards $(CURDIR)/configs $(TREE)
	MYPYPATH=.mypy_cache/tree $(BIN)/mypy $(MYPY) -p flowrl

docs: $(DOCS)
	$(BIN)/python -m mkdocs build --strict

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

lock: $(TOOLS)/uv
	$(COMPILE) --universal --upgrade --python-version 3.11 --generate-hashes --output-file requirements.lock

lowest: $(TOOLS)/uv
	@mkdir -p $(LOWEST)
	$(COMPILE) --resolution lowest-direct --output-file $(LOWEST)/requirements.txt
	$(TOOLS)/uv venv --quiet --allow-existing --python $(PYTHON) $(LOWEST)
	$(TOOLS)/uv pip sync --quiet --python $(LOWEST) $(LOWEST)/requirements.txt
	$(TOOLS)/uv pip install --quiet --python $(LOWEST) --no-deps --editable .
	HF_HUB_OFFLINE=1 $(LOWEST)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(LOWEST_TESTS)

release: test long check $(TOOLS)/uv
	$(BIN)/python -m pip check
	$(TOOLS)/pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock
	$(TOOLS)/python -m build
	$(TOOLS)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file dist/flowrl.cdx.json

$(TOOLS)/uv: pyproject.toml
	@test -x $(TOOLS)/python || $(PYTHON) -m venv .venv-tools
	$(TOOLS)/python -m pip install --quiet "build>=1.2" "cyclonedx-bom>=6" "pip-audit>=2.8" "uv>=0.5"
	@touch $@

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "flowrl needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`; name another: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: about 7 GB on Linux with PyTorch's CUDA, once; docs/install.md knows a smaller way"
	@# To compile all modules takes minutes: each is compiled when it is first imported.
ifeq ($(LOCK),)
	$(BIN)/python -m pip install --upgrade --no-compile --editable ".[dev]"
else
	@# uv unpacks packages side by side. It does not read pip's settings, such as another index; where it fails, pip installs.
	@awk '/^[^ ]/ { own = /^uv==/ } own' $(LOCK) > .venv/uv.txt
	$(BIN)/python -m pip install --quiet --require-hashes --requirement .venv/uv.txt
	$(BIN)/uv pip install --python $(BIN)/python --cache-dir .venv/uv --require-hashes --requirement $(LOCK) || \
	  $(BIN)/python -m pip install --no-compile --require-hashes --requirement $(LOCK)
	@rm -rf .venv/uv
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
endif
	@touch $@
