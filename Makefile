# Needs python3 (>= 3.11, with venv and pip), make and git. Everything else goes into .venv.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
SEED ?= 0

.PHONY: train test test-slow test-setup lint format bench reproduce clean

train: $(VENV)/.core
	$(BIN)/podracer train ppo_breakout_minatar --seed $(SEED)

test: $(VENV)/.test
	$(BIN)/pytest -n auto --dist loadscope

test-slow: $(VENV)/.test
	$(BIN)/pytest -m slow

test-setup: $(VENV)/.test

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.all
	$(BIN)/python -m benchmarks

reproduce: $(VENV)/.all
	$(BIN)/python -m benchmarks.learning

clean:
	rm -rf $(VENV)

# A stamp per set of packages: a second run installs nothing until the pins or the package's metadata change.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# With all that experiments train in.
$(VENV)/.all: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gymnasium,envpool,atari]'
	touch $@ $(VENV)/.core

$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.all $(VENV)/.core
