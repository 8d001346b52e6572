# Two commands: `make demo` (a verdict on a real model) and `make test` (lint, types, tests).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt

.PHONY: demo assets test check lint types unit clean

demo: $(VENV)/.demo assets
	@$(BIN)/python -m pipeline run recipes/demo.yaml; status=$$?; \
	case $$status in 0|1|5) exit 0;; *) exit $$status;; esac   # any verdict is a success of the demo

assets: $(VENV)/.demo
	@$(BIN)/python -m scripts.fetch_demo_model
	@$(BIN)/python -m evals.fetch_data

test check: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev assets
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf .pipeline

# torch first and pinned: an unpinned torch pulls a CUDA build of several gigabytes onto CPU machines.
$(VENV)/.torch:
	@echo "making $(VENV) (the first time takes some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=…")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@$(PIP) -e ".[demo,llama-cpp]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(PIP) -e ".[demo,llama-cpp,dev]"
	@touch $@
