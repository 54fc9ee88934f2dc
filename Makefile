# Everything a user needs; `make help` lists it. Windows and conda: see README.md.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
export JUPYTER_PREFER_ENV_PATH = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup sweep test test-oldest test-ray lint lab notebooks figures draft bench exactness architectures engine-llamacpp mutants clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else \
	  f"specnb needs Python 3.11 or 3.12, this is {v[0]}.{v[1]}; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(INSTALLED)

setup: $(INSTALLED)  ## make .venv, install the pinned packages, fetch SmolLM2
	@$(BIN)/specnb fetch

sweep: setup  ## measure speed against draft length: data/own/, figures/own/, table and verdict (options: ARGS="...")
	$(BIN)/specnb sweep --replace $(ARGS)

test: setup lint  ## lint, unit tests, doctests, and every notebook through nbval
	$(BIN)/python -m pytest -q
	$(BIN)/python -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout 300 notebooks/

# The oldest supported transformers, with the other pins as they are; the project's own shape and the browser left out.
OLDEST := .venv-oldest/.installed
$(OLDEST): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check transformers==5.13.1
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(OLDEST)

test-oldest: $(OLDEST)  ## unit tests against transformers 5.13.1, in an environment of its own
	.venv-oldest/bin/python -m pytest -q tests --ignore tests/test_lab.py --ignore tests/test_project.py

# Ray and what it needs, over the packages of .venv. jsonschema, which each process of Ray imports, would compile a grammar
# of URLs for seconds if it found rfc3987_syntax there; without it, it checks URLs no further.
RAY := .venv-ray/.installed
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(RAY): $(INSTALLED)
	$(BIN)/python -m venv .venv-ray
	printf 'import site, sys; sys.modules["rfc3987_syntax"] = None; site.addsitedir("%s")\n' \
	  "$$($(BIN)/python -c $(SITE))" > "$$(.venv-ray/bin/python -c $(SITE))/specnb.pth"
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check 'ray>=2.50'
	@touch $(RAY)

test-ray: $(RAY)  ## the test of the Ray extra, in an environment of its own
	.venv-ray/bin/python -m pytest -q tests/test_ray_sweep.py

lint: $(INSTALLED)  ## format, lint (notebooks too) and the import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

lab: setup  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks/ $(ARGS)

notebooks: setup  ## execute the notebooks again, in place
	$(BIN)/python scripts/execute_notebooks.py notebooks/*.ipynb notebooks/solutions/*.ipynb

figures: $(INSTALLED)  ## draw every figure again from data/
	$(BIN)/python scripts/draw_figures.py

draft: setup  ## make a draft for SmolLM2, or another chat target: ARGS="--target ..." (hours on a CPU; resumes)
	$(BIN)/python scripts/distill.py $(ARGS)

bench: setup  ## benchmarks: data/bench/, a table of ratios with intervals (nothing else may run)
	$(BIN)/python scripts/bench.py $(ARGS)

exactness: $(INSTALLED)  ## how good are the tests? 200 seeds of right and wrong samplers: data/exactness/
	$(BIN)/python scripts/exactness.py $(ARGS)

architectures: $(INSTALLED)  ## which models of transformers are exact? every type, as a tiny random one: data/architectures.md
	$(BIN)/python scripts/architectures.py

engine-llamacpp: setup .venv-llamacpp/bin/python  ## llama.cpp's server on loopback: concurrency, and is its speculation lossless? data/engines/
	$(BIN)/python scripts/engine_llamacpp.py $(ARGS)

.venv-llamacpp/bin/python:
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python -m pip install --quiet xllamacpp==2026.10.11549

mutants: $(INSTALLED)  ## plant faults in a copy of the package and see which test notices: tests/MUTANTS.md
	$(BIN)/python scripts/mutants.py

clean:  ## remove the environments (models and results stay)
	rm -rf .venv .venv-oldest .venv-ray .venv-llamacpp
