# make quickstart   install, align the embedded model, show before and after
# make test         install, run the whole test suite
# make check        lint, types, spelling, budgets
# make docs         build the documentation into site/
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TREE := .mypy_cache/tree/flowrl
# Other packages count as Any (reading torch's types takes a minute from cold), and optional record fields may be used without an assert.
MYPY := --follow-imports=skip --no-strict-optional --disable-error-code=var-annotated

.PHONY: quickstart test check docs

quickstart: $(STAMP)
	$(BIN)/flowrl train experiment=quickstart

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check flowrl samplers rewards configs scripts tests
	$(BIN)/codespell flowrl samplers rewards configs scripts docs $(wildcard *.md) # tests misspell on purpose
	$(BIN)/python scripts/check_budgets.py
	@# samplers/ and rewards/ import as flowrl.samplers and flowrl.rewards: mypy sees the package as a wheel would hold it.
	@rm -rf $(TREE) && mkdir -p $(TREE) && ln -s $(CURDIR)/flowrl/* $(CURDIR)/samplers $(CURDIR)/rewards $(CURDIR)/configs $(TREE)
	MYPYPATH=.mypy_cache/tree $(BIN)/mypy $(MYPY) -p flowrl

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "flowrl needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`; name another: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@
