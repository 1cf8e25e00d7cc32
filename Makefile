PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types ops fuzz zoo bench bench-quick bench-tables clean

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

# Peers without their dependencies: none of them may replace torch.
$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		opacus backpack-for-pytorch unfoldNd
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.tables

bench-quick: $(VENV)/.peers
	$(BIN)/python -m benchmarks --quick

bench-tables: $(VENV)/.peers
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV) build dist
