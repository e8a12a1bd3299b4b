# `make report` reproduces the result, `make test` checks the project. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PYTHONHASHSEED := 0

.PHONY: report studies test check format notebooks clean

report: $(STAMP)
	$(BIN)/shrinkage measure --world tiny --out reports/tiny-world --overwrite
	$(BIN)/shrinkage report reports/tiny-world --out reports/tiny-world
	$(BIN)/python -m analysis.report.readme

# The result and every further study (factors, propagation, closed loop, theory) in one report; takes minutes.
studies: $(STAMP)
	$(BIN)/shrinkage measure --world tiny --out runs/studies --overwrite
	$(BIN)/shrinkage ablate --world tiny --out runs/studies --overwrite --scenes 2 --clips 1 --every 3
	$(BIN)/shrinkage propagate --world tiny --out runs/studies --overwrite --scenes 1 --every 2
	$(BIN)/shrinkage rollout --world tiny --out runs/studies --overwrite --scenes 3 --clips 2
	$(BIN)/shrinkage report runs/studies --out runs/studies

test: check

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Runs every notebook and stores its outputs; nothing else writes them.
notebooks: studies
	SHRINKAGE_RUN=../runs/studies $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
