# Everything starts from a bare Python 3.11: `make demo` and `make test` create the environment themselves.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# pip's local wheels serve uv as well.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
WORKERS ?= 2
SEEDS ?= 200

.PHONY: help demo demo-seeds test chaos check bench docs clean

help:
	@echo "make demo        train a small model on Countdown: environment, warm start, GRPO, evaluation"
	@echo "make demo-seeds  the demo with three seeds, as a table"
	@echo "make test        all tests"
	@echo "make chaos       SEEDS=200 runs in which something is killed or fails, as a table; SEED=17: that one again"
	@echo "make check       ruff, mypy, import rules"
	@echo "make bench       benchmarks (ratios measured side by side)"
	@echo "make docs        build the documentation"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "uv>=0.8,<1"
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/grpo run deployments/configs/demo.yaml

demo-seeds: $(READY)
	$(BIN)/python tests/benchmarks/demo_seeds.py

test: $(READY)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

chaos: $(READY)
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python tests/benchmarks/run.py

docs: $(READY)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
