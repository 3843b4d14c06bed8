# Two commands on a fresh machine: make demo, make test. Both create .venv themselves (Python 3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint clean

# dflash: z-lab's own reader of drafts, for one test; without its dependencies, which it pins to other versions than ours.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,serve]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt dflash
	touch $@

# The pocket model through the whole pipeline on a CPU: QAT, export, re-read, one table. Rebuilds build/demo.
demo: $(STAMP)
	$(BIN)/python recipes/pocket/demo.py --out build/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 30

lint: $(STAMP)
	$(BIN)/ruff check .
	mkdir -p build/typing/kilotok
	for d in kernels quant dflash train runtime recipes; do ln -sfn ../../../$$d build/typing/kilotok/$$d; done
	MYPYPATH=build/typing $(BIN)/mypy --namespace-packages --explicit-package-bases -p kilotok

clean:
	rm -rf build $(VENV)
