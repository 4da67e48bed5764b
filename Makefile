# `make demo` and `make test` are the only commands a fresh clone needs: each makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?=
DEMO_FLAGS ?=
SEEDS ?= 20000

.PHONY: demo test check bench docs chaos clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DiffuRefill needs Python 3.11 or newer; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/diffurefill demo $(if $(DATA),--data $(DATA)) $(DEMO_FLAGS)

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

bench: $(VENV)/ready
	for script in bench/[!_]*.py; do $(BIN)/python $$script --quick || exit 1; done

# The figures and tables of README.md and docs/, from results/.
docs: $(VENV)/ready
	$(BIN)/python docs/render.py

# The fleet under faults: so many simulated lives of it, and every guard switched off once.
chaos: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python bench/chaos.py --seeds $(SEEDS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
