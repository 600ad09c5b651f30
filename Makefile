# Needs only make and Python >= 3.11 with venv; everything else is installed in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.installed-docs
JOBS  ?= 2

# torchrun with two gloo ranks; when one fails, only the ranks' own message is printed.
TORCHRUN := $(BIN)/python examples/_torchrun.py --nproc-per-node 2

.PHONY: help venv published test explore writes laws mutants oracle proofs coverage races kernels sweep inductor newest matrix lint types docs demo bench images clean zoo alarms detection reach time

help: ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

venv: $(STAMP) ## make the test environment in .venv

# Uses the first interpreter that is new enough and can make an environment with pip in it.
$(STAMP): pyproject.toml constraints.txt
	@if ! [ -x $(BIN)/python ]; then \
	  for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null; then \
	      echo "making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV); break; \
	    fi; \
	  done; \
	fi
	@[ -x $(BIN)/python ] || { \
	  echo "no Python >= 3.11 with venv and ensurepip found; say which: make PYTHON=..." >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints.txt -e '.[test,examples]'
	@touch $@

# The tests of a file share a process, so that its fixtures (such as jobs of several ranks) are set up once.
# In order of collection the last ones are many small ones, and no process waits long for the other.
test: $(STAMP) ## run all tests, in JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

explore: $(STAMP) ## run tests with many more examples per property (ARGS=tests/functional/effects/test_writes.py)
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile=explore --timeout 3600 $(ARGS)

writes: $(STAMP) ## 10,000 random programs that write in place: numbers, then reports of memory (hours; ARGS="1000 SEED")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/write_checks.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/write_peaks.py $(ARGS)

laws: $(STAMP) ## ten times as many stacks of transforms as make test (all of them: ARGS="--every 1")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/library_laws.py --out tests/results/laws.md $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/control_laws.py --out tests/results/control-laws.md $(ARGS)

mutants: $(STAMP) ## break the library in a hundred places, and see which tests notice (an hour; ARGS="--only eps")
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[mutants]'
	$(BIN)/python tests/support/mutants.py --jobs $(JOBS) $(ARGS)

oracle: $(STAMP) ## compare values, gradients and collectives with JAX's on eight ranks (installs JAX)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[oracle]'
	OMP_NUM_THREADS=1 $(BIN)/python tests/oracle/compare.py --out tests/results/jax-oracle.md $(ARGS)

coverage: $(STAMP) ## run all tests with lines and branches counted, and write tests/results/coverage.md
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[coverage]'
	ROOT=$(CURDIR) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --timeout 900 --cov --cov-report= $(ARGS)
	ROOT=$(CURDIR) $(BIN)/python tests/support/coverage_table.py > tests/results/coverage.md
	@head -12 tests/results/coverage.md

proofs: $(STAMP) ## prove the plans of recipes and models, Llama 3 405B on 4,096 ranks among them (some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/proofs.py --out tests/results/proofs.md $(ARGS)

races: $(STAMP) ## two jobs save to one path a thousand times, every second time one is killed (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/racing_saves.py --out tests/results/saves.md $(ARGS)

kernels: $(STAMP) ## compare every kernel of the library with its references, in all dtypes and transforms
	$(BIN)/python -m pytest -n $(JOBS) --all-cases tests/kernels/library/test_kernels.py $(ARGS)

sweep: $(STAMP) ## run torch's own sample calls of every operator sharded (half an hour; ARGS="--only sort")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/op_sweep.py $(ARGS)

zoo: $(STAMP) ## gradients of 38 families of HuggingFace models under every transform (ten minutes; ARGS="--only bert")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/zoo.py --out tests/results/zoo.md $(ARGS)

# Published packages are installed without what they require: some ask for another torch, or for torchvision.
PUBLISHED := PYTHONPATH=tests/support:$(VENV)/published OMP_NUM_THREADS=1 $(BIN)/python

published: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --upgrade --target $(VENV)/published -r tests/published/packages.txt

alarms: published ## correct functions on drawn arguments: what torchard.testing finds is false (ARGS="--draws 10000")
	$(PUBLISHED) tests/published/false_alarms.py --out tests/results/alarms.md $(ARGS)

detection: published ## bugs planted in 40 functions, and what finds them (ARGS="--only attention")
	$(PUBLISHED) tests/published/detection.py --out tests/results/detection.md $(ARGS)

reach: published ## the laws of torchard.testing on a hundred published functions (ARGS="--only kornia")
	$(PUBLISHED) tests/published/reach.py --out tests/results/reach.md $(ARGS)

inductor: $(STAMP) ## compare Inductor with eager: random programs and torch's own samples (an hour; ARGS="--only op_db")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/inductor_sweep.py $(ARGS)

newest: $(STAMP) ## run some of the tests on the newest supported torch (installs gigabytes)
	$(BIN)/python tests/support/matrix.py --only newest --part -- -n $(JOBS) --dist loadfile $(ARGS)

matrix: $(STAMP) ## run all tests on the oldest, the pinned and the newest torch (ARGS="--only oldest")
	$(BIN)/python tests/support/matrix.py $(ARGS) -- -n $(JOBS) --dist loadfile

lint: $(STAMP) ## run ruff
	$(BIN)/ruff check .

# By the name of the installed package, as a user's own mypy run sees it.
types: $(STAMP) ## run mypy --strict
	$(BIN)/mypy --strict -p torchard

# What builds the guide is installed when it is first built; the tests run its pages without that.
docs: $(DOCS) ## build the guide and the reference in docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	@touch $@

demo: $(STAMP) ## train one model by three plans, on two gloo ranks and a virtual mesh (two minutes at most)
	$(TORCHRUN) examples/train_gpt.py --mesh tp=2 --plan tp --steps 150
	$(TORCHRUN) examples/train_gpt.py --mesh dp=2 --plan fsdp --steps 150
	$(BIN)/python examples/train_gpt.py --virtual dp=2,tp=2 --plan fsdp+tp --steps 50

time: $(STAMP) ## measure this machine, then predicted beside measured seconds of plans on two and four ranks (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/predicted.py $(ARGS)

bench: $(STAMP) ## time torchard, DTensor and hand-written Megatron; planning; experts' plans; memory; decoding; pipelines; rivals; fusion (ARGS=--quick)
	$(BIN)/python benchmarks/bench.py $(ARGS)
	$(BIN)/python benchmarks/planning.py $(ARGS)
	$(BIN)/python benchmarks/experts.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/by_machine.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/models_by_machine.py $(ARGS)
	$(BIN)/python benchmarks/memory.py $(ARGS)
	$(BIN)/python benchmarks/planned_memory.py $(ARGS)
	$(BIN)/python benchmarks/decoding.py $(ARGS)
	$(BIN)/python benchmarks/accumulation.py $(ARGS)
	$(BIN)/python benchmarks/pipelines.py $(ARGS)
	$(BIN)/python benchmarks/rivals.py $(ARGS)
	$(BIN)/python benchmarks/fusion.py $(ARGS)
	$(BIN)/python benchmarks/steps.py $(ARGS)
	$(BIN)/python benchmarks/kernel_rows.py
	$(BIN)/python benchmarks/first_fuse.py
	$(BIN)/python benchmarks/compile_cache.py $(ARGS)
	$(BIN)/python benchmarks/long_runs.py $(ARGS)

images: $(STAMP) ## compare plans for split images with and without constraints (ten minutes; ARGS=--quick)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/images.py $(ARGS)

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	rm -rf docs/_build docs/reference/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
