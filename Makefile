# Every target makes its own environment when there is none; all it needs is Python 3.11 or newer and a package index.

SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
INSTALLED := $(CURDIR)/build/installed
NOTEBOOKS := $(sort $(wildcard nbs/*/*.ipynb))
TESTS ?= tests
# One worker for each core, two at least, and eight at most: each may need two gigabytes.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2> /dev/null || echo 2); echo $$((cores < 2 ? 2 : cores > 8 ? 8 : cores)))
THREADS ?= 1
FLAGS ?=

# Parallel workers share the cores, so each keeps to one; no test draws on a screen. DPFT_TESTING lets DPFT_SALT in.
ONE_CORE := OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false MPLBACKEND=agg DPFT_TESTING=1

# The stages of `make test`: the site, which is made beside the others, and then the cheap ones first.
STAGES := rendered lint types exported book executed tested

# `make salted`: other streams for every seed. `make elsewhere`: a processor with some of its features turned off.
SALTS ?= 1 2 3 4 5
SALTED := $(if $(DPFT_SALT),$(CURDIR)/tests/salted:)
ELSEWHERE ?= MKL_CBWR=COMPATIBLE MKL_CBWR=SSE4_2 MKL_CBWR=AVX2 MKL_CBWR=AVX512 \
  ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 \
  THREADS=1 THREADS=2,WORKERS=1
UNDER = MAKE="$(MAKE)" NOTEBOOKS="$(NOTEBOOKS)" TESTS="$(TESTS)" .ci/under

.PHONY: help run llm test $(STAGES) salted elsewhere ranges export notebooks site preview bench fuzz clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/make \1 @\2/' | column -t -s @

run: $(READY) ## fine-tune a model on real handwritten digits: a table and a figure under quickstart/
	@$(BIN)/python -m dpft quickstart

llm: $(READY) ## fine-tune a language model of 135 million parameters privately in under 30 minutes on two free cores; texts before and after, under llm/
	@$(BIN)/python -m dpft llm $(FLAGS)

test: $(READY) ## everything that must hold before a change lands
	+@MAKE="$(MAKE)" .ci/stages $(STAGES)

salted: $(READY) ## notebooks and tests with other random streams (SALTS="1 2 3 4 5"); a line for each in build/salted.txt
	@echo "left out, because they hold for one stream by value:"; $(BIN)/python nbs/_book.py pinned
	@$(BIN)/python -m pytest -q --collect-only -m pinned $(TESTS) | grep :: || true
	+@$(UNDER) build/salted.txt $(SALTS:%=DPFT_SALT=%)

elsewhere: $(READY) ## notebooks and tests without this processor's features (ELSEWHERE="MKL_CBWR=AVX2 ..."); a line for each in build/elsewhere.txt
	+@$(UNDER) build/elsewhere.txt $(ELSEWHERE)

ranges: ## the lowest and the highest versions that settings.ini allows, each in an environment of its own (FLAGS="--ends lowest")
	@$(ONE_CORE) $(PYTHON) tests/ranges.py $(FLAGS)

export: $(READY) ## notebooks to package, then clean the notebooks
	@$(BIN)/python nbs/_book.py export

notebooks: $(READY) ## run every notebook from a fresh process and store its outputs (FLAGS="gpu slow": those cells too)
	@set -e; for notebook in $(NOTEBOOKS); do echo "$$notebook"; $(BIN)/python nbs/_book.py run "$$notebook" $(FLAGS); done
	@$(BIN)/python nbs/_book.py export

# Quarto keeps filtered notebooks by their content alone, so a cache of its own makes sure that the settings of today are used.
site: $(READY) ## the book as a site under _docs/, with Quarto, and looked over
	@command -v quarto > /dev/null || { echo "make site needs Quarto, which is at https://quarto.org" >&2; exit 1; }
	@$(BIN)/python nbs/_reference.py
	@set -o pipefail; mkdir -p build; rm -rf build/cache; XDG_CACHE_HOME="$(CURDIR)/build/cache" PATH="$(BIN):$$PATH" quarto render --no-execute 2>&1 | tee build/site.log
	@if grep "Unable to resolve" build/site.log; then exit 1; fi
	@$(BIN)/python nbs/_site.py check

preview: $(READY) ## the book in a browser by Quarto's own preview, each page made again when its file changes
	@$(BIN)/python nbs/_reference.py
	@PATH="$(BIN):$$PATH" quarto preview --no-execute

bench: $(READY) ## time and memory; the only place where a clock decides
	@$(BIN)/python -m dpft bench

fuzz: $(READY) ## ten times as many random models, batches and bounds as in make test
	@$(ONE_CORE) DPFT_PROFILE=full $(BIN)/python -m pytest -q tests/test_fuzz.py

clean: ## remove what the targets made, apart from the environment
	@rm -rf build dist *.egg-info _docs reference _proc .quarto quickstart llm bench figures .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find dpft nbs tests -name __pycache__ -prune -exec rm -rf {} +

# The environment: pinned by constraints.txt, with the checkout installed for development.
$(READY): settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("dpft needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt --editable '.[dev,text,minilm,book]'
	@rm -rf build *.egg-info; touch $@

lint:
	@$(BIN)/ruff check .

types:
	@$(BIN)/mypy dpft --ignore-missing-imports --disallow-untyped-defs --check-untyped-defs

exported:
	@$(BIN)/python nbs/_book.py exported

book:
	@$(BIN)/python -P -m pytest -q tests/test_book.py

rendered:
	@if command -v quarto > /dev/null; then $(MAKE) --no-print-directory site; else echo "skipped: Quarto is not on PATH"; fi

# One process for each notebook, so nothing leaks from one into the next; cells marked gpu or slow are left out.
executed:
	@$(ONE_CORE) PYTHONPATH="$(SALTED)$$PYTHONPATH" $(BIN)/python nbs/_book.py test $(WORKERS) $(NOTEBOOKS)

# The package is built and installed as a user has it, not editable, and stands before the checkout on the path.
tested:
	@rm -rf build/lib build/bdist* $(INSTALLED) *.egg-info
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(INSTALLED) .
	@rm -rf build/lib build/bdist* *.egg-info
	@$(ONE_CORE) PYTHONSAFEPATH=1 PYTHONPATH=$(SALTED)$(INSTALLED) DPFT_INSTALLED=$(INSTALLED) \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(if $(DPFT_SALT),--hypothesis-seed=$(DPFT_SALT)) $(TESTS)
