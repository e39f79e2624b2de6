# `make venv` makes the environment, `make demo` shows the split serving beside the unsplit, `make test` proves it.
PYTHON ?= python3
VLLM := 0.32.0
RELEASES := 0.19.1 0.26.0 0.32.0
BIN := .venv/bin
READY := .venv/.afd-ready

.PHONY: venv demo test test-vllm test-models mutants lint check tables clean

venv: $(READY)

$(READY): pyproject.toml scripts/environment.py
	$(PYTHON) scripts/environment.py --vllm $(VLLM) .venv
	touch $@

demo: venv
	$(BIN)/python -m demo

# The end-to-end tests share a few servers, so they run in one process; the others run side by side.
test: venv
	$(BIN)/python -m pytest --ignore=tests/e2e --ignore=tests/models -n 2
	$(BIN)/python -m pytest tests/e2e -v
	$(BIN)/python -m pytest tests/models -m "not slow" -v

# The end-to-end tests on another release, in an environment of its own: make test-vllm VLLM=0.26.0
test-vllm:
	$(PYTHON) scripts/environment.py --vllm $(VLLM) .venv-$(VLLM)
	.venv-$(VLLM)/bin/python -m pytest tests/e2e -v

# Every model family that runs on the CPU, split and unsplit, one after another.
test-models: venv
	$(BIN)/python -m pytest tests/models -v

# All small semantic edits of upstream's layers; the test suite takes a sample.
mutants: venv
	$(BIN)/python -m tests.mutants.corpus

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Drift: what is checked in must be what the compiler writes today.
check: venv
	set -e; for release in $(RELEASES); do $(BIN)/afd-compile --all --check --vllm $$release; done

# The documents that the compiler writes.
tables: venv
	$(BIN)/afd-compile --all --table --vllm $(VLLM) --platform cpu --platform cuda --platform rocm > docs/models.md

clean:
	rm -rf .venv .demo .mypy_cache .ruff_cache .pytest_cache
