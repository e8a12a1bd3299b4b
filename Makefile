# `make report` reproduces the result, `make test` checks the project. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := reports/tiny-world
WORLD := --world tiny --out $(RUN) --overwrite

export PYTHONHASHSEED := 0

.PHONY: report tables measure ablate propagate rollout test check format notebooks clean

report: tables
	$(BIN)/shrinkage report $(RUN) --out $(RUN)
	$(BIN)/python -m analysis.report.readme

# The tables of every study, two at a time with one thread each: the same bytes however many cores there are.
tables: $(STAMP)
	OMP_NUM_THREADS=1 TTY_INTERACTIVE=0 $(MAKE) --no-print-directory -j 2 rollout propagate measure ablate

measure: $(STAMP)
	$(BIN)/shrinkage measure $(WORLD)

ablate: $(STAMP)
	$(BIN)/shrinkage ablate $(WORLD) --scenes 2 --clips 1 --every 2

propagate: $(STAMP)
	$(BIN)/shrinkage propagate $(WORLD) --scenes 2 --every 2

rollout: $(STAMP)
	$(BIN)/shrinkage rollout $(WORLD) --scenes 4 --clips 2 --workers 1

test: check

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Runs every notebook on the committed tables and stores its outputs; nothing else writes them.
notebooks: $(STAMP)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
