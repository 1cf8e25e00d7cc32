PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-browser smoke docs release-check lint types ops fuzz zoo bench bench-quick \
	bench-tables suspects works private-check gpu-check third-party clean
BROWSER := build/browser

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(PIP) -e ".[demo,test]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/persample inspect

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# A process for each core, with one thread each: most tests are too small for more.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

$(BROWSER)/node_modules/playwright-core:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)
	mkdir -p $(BROWSER)
	cd $(BROWSER) && npm install --silent --no-save --no-package-lock playwright-core@1

test-browser: $(VENV)/.installed $(BROWSER)/node_modules/playwright-core
	$(BIN)/python -m tests.browser.pages $(BROWSER)
	node tests/browser/page.mjs $(BROWSER)

# Every other target, cut down to seconds.
smoke: $(VENV)/.installed $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.smoke

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e ".[docs,release]"
	touch $@

# A static site in build/site; nothing is loaded from elsewhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# ARGS="--with-dependencies" also installs the CUDA libraries that some wheels of torch need.
release-check: $(VENV)/.docs
	$(BIN)/python -m tests.release $(ARGS)

ops: $(VENV)/.installed
	$(BIN)/python -m tests.operators
	$(BIN)/python -m tests.operators --ids
	$(BIN)/python -m tests.modules

fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.graphs 2000
	$(BIN)/python -m tests.graphs 2000 --ids
	$(BIN)/python -m tests.loops 2000

zoo: $(VENV)/.installed
	$(BIN)/python -m tests.zoo

# Peers without their dependencies: none of them may replace torch.
$(VENV)/.peers: $(VENV)/.installed
	$(PIP) -e ".[bench]"
	$(PIP) --no-deps opacus backpack-for-pytorch unfoldNd
	$(PIP) --no-deps opake opake-base opake-engine opake-dpsgd opake-accounting opake-patches \
		optree torchopt || echo "opake: not installed"
	$(PIP) --no-deps dattri-llm tqdm || echo "dattri-llm: not installed"
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks
	MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_MMAP_THRESHOLD_=100000000000 \
		$(BIN)/python -m benchmarks.expanded_weights --out benchmarks/results/expanded_weights.json
	$(BIN)/python -m benchmarks.tables

bench-quick: $(VENV)/.peers
	$(BIN)/python -m benchmarks --quick

bench-tables: $(VENV)/.peers
	$(BIN)/python -m benchmarks.tables

works: $(VENV)/.installed
	$(BIN)/python -m tests.works

# Models of other packages, in an environment of their own: none of them may replace torch, and one
# that cannot be installed is skipped. A torchaudio built for another torch does not load.
THIRD := build/third-party
THIRD_PIP := $(THIRD)/bin/pip install --quiet --disable-pip-version-check

$(THIRD)/.installed: tests/third_party/requirements.txt
	$(PYTHON) -m venv $(THIRD)
	printf 'torch==2.13.0\nnumpy==2.4.6\n' > $(THIRD)/pins.txt
	$(THIRD_PIP) torch==2.13.0 numpy==2.4.6
	$(THIRD_PIP) --no-deps -e .
	grep -v '^#' $< | while read -r name; do \
		$(THIRD_PIP) -c $(THIRD)/pins.txt "$$name" || $(THIRD_PIP) --no-deps "$$name" || \
		echo "$$name: not installed"; \
	done
	$(THIRD)/bin/pip uninstall --quiet --yes torchaudio || true
	touch $@

third-party: $(THIRD)/.installed
	OMP_NUM_THREADS=1 $(THIRD)/bin/python -m tests.third_party --write

private-check: $(VENV)/.installed
	$(BIN)/python -m tests.private.check

gpu-check: $(VENV)/.installed
	$(BIN)/python -m tests.gpu

suspects: $(VENV)/.installed
	$(BIN)/python -m benchmarks.suspects --out benchmarks/results/suspects.json --plot docs/suspects.svg

clean:
	rm -rf $(VENV) build dist
