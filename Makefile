# Everything a fresh machine needs is Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-plain test-all test-browser lint format docs notebooks bench clean

demo: $(STAMP)
	$(BIN)/coterie demo

# Two processes of one thread each: more threads than cores only wait for each other. Tests of one group (those that share
# compiled steps) run in one of the two.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# The same suite in ordinary PyTorch: what every fast path must agree with, and what machines without a compiler run.
test-plain: $(STAMP)
	COTERIE_BACKEND=plain OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: lint
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,ray,tensorboard]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow or not slow"

# The report in a real browser: Debian's Chromium, driven by playwright.
test-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,browser,figures]"
	@command -v chromium >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium; } || \
	{ echo "There is no chromium here: install it (Debian: sudo apt install chromium), then run this again."; exit 1; }
	$(BIN)/python -m pytest tests/report/test_browser.py -m slow -rs

lint: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples mkdocs_hooks.py .ci
	$(BIN)/ruff check src tests benchmarks examples mkdocs_hooks.py .ci
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples mkdocs_hooks.py .ci
	$(BIN)/ruff check --fix src tests benchmarks examples mkdocs_hooks.py .ci

# The site, in site/: a warning, a broken link or anchor, or a page that needs another host is an error.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Executes docs/notebooks and writes them with their outputs (two minutes); needs a Chromium, which draws their figures.
notebooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs,flower,figures]"
	$(BIN)/python .ci/notebooks.py

# All of benchmarks/, in under 15 minutes on two cores; writes docs/performance.md.
bench: $(STAMP)
	$(BIN)/python benchmarks/all.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,peers,flower,onnx,parquet,tune,privacy]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
