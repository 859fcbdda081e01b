# `make profile` prints what ViT-B/16 costs; `make test` runs every check. Both build .venv first, once.
# `make coverage` says which branches the tests take; `make release-check` builds and tries what is published.
PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# An install compiles to byte code, an editable one does not: where PYTHONDONTWRITEBYTECODE is set, each import would.
COMPILE := $(BIN)/python -m compileall -q analyzer
# What pytest makes of each file of tests is kept beside it, or each of its processes makes it again: 15 s.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest

.PHONY: profile test audit matrix coverage release-check docs screenshots clean

profile: $(VENV)/installed
	$(BIN)/analyzer profile vit_b_16 --input 8x3x224x224 --show table,screen

# Types are checked beside the tests: the first time that takes minutes of one core, with no other to do.
# `make test CASES=--all-cases`: with every case of the sweeps of which a sample runs (tests/conftest.py).
# `make test TORCH=2.10.0`: the core tests with that torch, in an environment of its own.
ifeq ($(TORCH),$(PINNED))
test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(COMPILE)
	@mkdir -p build
	$(BIN)/mypy --strict > build/types.txt & types=$$!; $(PYTEST) -n 2$(if $(CASES), $(CASES)); failed=$$?; \
	wait $$types || failed=$$?; cat build/types.txt; exit $$failed
else
test:
	$(PYTHON) -m benchmarks.coverage.matrix --torch $(TORCH)
endif

# The core tests with every torch from 2.9, and under every Python that is found; see benchmarks/coverage/matrix.py.
matrix:
	$(PYTHON) -m benchmarks.coverage.matrix --all --delete --keep-result

# Of all processes that the tests start, too.
coverage: $(VENV)/installed-dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2; failed=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered; exit $$failed

release-check: $(VENV)/installed-dev
	$(PIP) -e '.[release]'
	$(BIN)/python tests/release_check.py

# Dangerous code, and known weaknesses of what is installed; the second asks PyPI.
audit: $(VENV)/installed
	$(PIP) -e '.[audit]'
	$(BIN)/bandit -q -c pyproject.toml -r analyzer
	$(BIN)/pip-audit --progress-spinner off

# The documentation site, built into site/ and served here; `make test` builds it too and takes no warning.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

# What the browser tests see, to be looked at: pages at 1400 and 800 px, light and dark. Needs chromium.
screenshots: $(VENV)/installed-dev
	ANALYZER_SCREENSHOTS=build/screenshots $(BIN)/pytest tests/report/test_page_browser.py
	@ls build/screenshots

# Torch alone and pinned first: what is then installed finds it and brings no other, gigabytes larger.
# For the CPU build from PyTorch's own index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "analyzer needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1); say which: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(PINNED)
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml setup.cfg
	$(PIP) -e .
	$(COMPILE)
	@touch $@

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml setup.cfg
	$(PIP) -e '.[dev]'
	$(COMPILE)
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .venv-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
