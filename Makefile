# Everything starts from a bare Python 3.11: `make demo` and `make test` create the environment themselves.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# pip's local wheels serve uv as well.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Empty: a fresh environment is compiled as it is imported, not again by each of hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
PEERS ?= $(VENV)-peers
WORKERS ?= 2
SEEDS ?= 200

.PHONY: help demo demo-seeds test screenshots chaos check bench bench-peers profile docs clean

help:
	@echo "make demo        train a small model on Countdown: environment, warm start, GRPO, evaluation"
	@echo "make demo-seeds  the demo with three seeds, as a table"
	@echo "make test        all tests"
	@echo "make screenshots the pictures of docs/images, from real runs in real pages"
	@echo "make chaos       SEEDS=200 runs in which something is killed or fails, as a table; SEED=17: that one again"
	@echo "make check       ruff, mypy, import rules, documentation without warnings"
	@echo "make bench       benchmarks (ratios measured side by side)"
	@echo "make bench-peers ours and TRL's GRPOTrainer in turns on one core (two hours); ARGS='S-128 --seeds 0' for less"
	@echo "make profile     where an iteration's time goes, in one process and on workers"
	@echo "make docs        write the generated pages, build the documentation into site/"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "uv>=0.8,<1"
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/grpo run deployments/configs/demo.yaml

demo-seeds: $(READY)
	$(BIN)/python tests/benchmarks/demo_seeds.py

# In the order of the folders: the long files first, the many short ones of unit/ fill the rest.
test: $(READY)
	$(BIN)/python tests/programs.py
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# In a folder with a short name: it is seen on the pages.
screenshots: $(READY)
	$(BIN)/python tests/programs.py
	GRPO_SCREENSHOTS=docs/images $(BIN)/pytest -q tests/browser --basetemp=/tmp/grpo

chaos: $(READY)
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	$(BIN)/python tests/benchmarks/run.py

# TRL has an environment of its own.
$(PEERS)/.installed: tests/benchmarks/peers/requirements.txt $(READY)
	$(PYTHON) -m venv $(PEERS)
	VIRTUAL_ENV=$(PEERS) $(BIN)/uv pip install -q -r $<
	@touch $@

bench-peers: $(READY) $(PEERS)/.installed
	$(BIN)/python tests/benchmarks/peers/run.py --trl $(PEERS)/bin/python $(ARGS)

profile: $(READY)
	$(BIN)/python tests/benchmarks/profile/run.py $(ARGS)

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(PEERS) site .pytest_cache .mypy_cache .ruff_cache
