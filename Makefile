PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types ops fuzz zoo bench works gpu-check clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,test]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m demo.digits

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

ops: $(VENV)/.installed
	$(BIN)/python -m tests.operators
	$(BIN)/python -m tests.modules

fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.graphs 2000

zoo: $(VENV)/.installed
	$(BIN)/python -m tests.zoo

bench: $(VENV)/.installed
	MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_MMAP_THRESHOLD_=100000000000 \
		$(BIN)/python -m benchmarks --out benchmarks/results/ratios.json
	MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_MMAP_THRESHOLD_=100000000000 \
		$(BIN)/python -m benchmarks.expanded_weights --out benchmarks/results/expanded_weights.json

works: $(VENV)/.installed
	$(BIN)/python -m tests.works

gpu-check: $(VENV)/.installed
	$(BIN)/python -m tests.gpu

clean:
	rm -rf $(VENV) build dist
