# make setup | demo | demo-real | quick | test | test-avx2 | durations | test-long | fmt | check | docs |
# bench-peers | bench-readme | check-cuda-fake. The first makes .venv; the others but the last, which has an environment of its own, call it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SHELL := /bin/bash
# Many images set this, and every process then compiles torch, Ray and us anew: three times the start-up of a run.
export PYTHONDONTWRITEBYTECODE :=
# Most of a test's time is waiting for Ray: two processes share two cores well.
TEST_PROCESSES ?= 2

.PHONY: setup demo demo-real quick test test-avx2 durations test-long fmt check docs bench-peers bench-readme check-cuda-fake
.DEFAULT_GOAL := demo

setup: $(STAMP)

# Keyed on the content of the dependency lists: a second run, or a fresh date on a file, installs nothing.
# --no-compile: of thousands of modules a small part is ever imported; that part is compiled at the end, whoever runs it.
$(STAMP): pyproject.toml setup.py constraints.txt
	@set -e -o pipefail; \
	key="$$(cat pyproject.toml setup.py constraints.txt | cksum)"; \
	if [ -x $(BIN)/rlhfspec ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$key" ]; then touch $(STAMP); exit 0; fi; \
	$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"setup needs Python 3.11 or later, got {v}; run: make setup PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'; \
	[ -x $(BIN)/python ] || { echo "setup: making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }; \
	echo "setup: installing pinned dependencies into .venv (minutes the first time; log: .venv/install.log)"; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt -e '.[dev]' 2>&1 \
	  | tee .venv/install.log \
	  | awk '/^Collecting/ {n++} /Downloading .*MB\)/ {print "  " n " packages: " $$2, $$3, $$4} /^Installing collected/ {print "  installing"} {fflush()}' \
	  || { tail -n 20 .venv/install.log; echo "setup: installation failed; see .venv/install.log"; exit 1; }; \
	echo "setup: compiling what a run imports"; \
	$(BIN)/python -c 'import datasets, peft, pyarrow.parquet, ray.dashboard.dashboard, ray.serve, torch, transformers.models.llama.modeling_llama'; \
	$(BIN)/python -m compileall -q core profiles policies engine learning actors cluster integrations; \
	echo "$$key" > $(STAMP); \
	echo "setup: done"

demo: setup
	$(BIN)/rlhfspec demo

# A real chat model: gets it (98 MB) on the first run, then trains it.
demo-real: setup
	$(BIN)/rlhfspec models get smollm2-135m-instruct
	$(BIN)/rlhfspec train --config configs/smollm2_grpo.yaml

# A file's tests stay in one process; files are begun in the order that tests/helpers/seconds_of_tests.py gives them.
PYTEST := $(BIN)/python -m pytest --durations=20
SHARED := --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

# Everything that needs no Ray; a test above two seconds fails.
quick: setup
	$(PYTEST) $(SHARED) -m "not ray and not slow" --limit-quick

test: setup
	$(PYTEST) $(SHARED)

# What computes a second time: as on a processor without AVX-512, which rounds otherwise and has no bfloat16, and with
# every shape and type of the engine and of learning checked at each call, which is three times as slow: some minutes.
# Groups of trainers, minutes of processes, compute what one trainer does; Triton's interpreter asks no processor.
COMPUTES := $(addprefix tests/engine/,attention cpu decoding model test_losslessness.py) tests/cluster/verify \
  $(addprefix tests/learning/,training $(patsubst %,rewards/test_%.py,engine_scores reward_model token_rewards)) \
  --ignore-glob='*_cuda.py' $(patsubst %,--ignore=tests/learning/training/test_%.py, \
  several_trainers scored_by_the_engine supervised_group fused_rows)
test-avx2: setup
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(SHARED) \
	  --jaxtyping-packages=rlhfspec.engine,rlhfspec.learning,beartype.beartype -m "not ray and not slow" $(COMPUTES)

# All tests, and tests/durations.json anew, which orders them.
durations: setup
	$(PYTEST) $(SHARED) --keep-durations

# Proofs that take minutes each: drivers killed and resumed, an autoscaler, a node that ends.
test-long: setup
	RLHFSPEC_LONG_PROOFS=1 $(PYTEST) -m long

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_layers.py

# The documentation as a site in build/site; a broken link or a page without a place in mkdocs.yml fails.
docs: setup
	@[ -x $(BIN)/mkdocs ] || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Engines that `rlhfspec bench engine` compares with, each in an environment of its own (gigabytes; minutes), and TRL.
bench-peers: setup
	$(BIN)/python -m rlhfspec.benchmarks.peers.build

# Every figure and picture of the README anew, into benchmarks/results: under an hour on two quiet cores, of what is
# committed. It goes on where it was broken off. SIZE=--quick tries the parts and files nothing.
bench-readme: setup
	$(BIN)/python -m rlhfspec.benchmarks.pages.measure $(SIZE)

# Decode step, update and publication on pretended CUDA tensors, without a GPU: by hand, not in CI.
# Makes an environment with a CUDA build of torch (2.5 GB to get, 6 GB on the disk).
FAKE := .venv-cuda-fake
check-cuda-fake: $(FAKE)/.installed
	OMP_NUM_THREADS=1 $(FAKE)/bin/python -m pytest tests/engine/test_pretended_cuda.py tests/learning/test_pretended_cuda.py

$(FAKE)/.installed: pyproject.toml constraints.txt benchmarks/selftest/cuda-fake.txt
	@set -e -o pipefail; \
	$(FAKE)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(FAKE); \
	echo "check-cuda-fake: installing a CUDA build of torch into $(FAKE) (gigabytes; log: $(FAKE)/install.log)"; \
	$(FAKE)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt \
	  -r benchmarks/selftest/cuda-fake.txt > $(FAKE)/install.log 2>&1 \
	  && $(FAKE)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__' 2>> $(FAKE)/install.log \
	  || { tail -n 3 $(FAKE)/install.log; \
	       echo "check-cuda-fake: expected a package index with a CUDA build of torch 2.13.0 for this Python, Linux on x86-64;" \
	         "got the lines above; name a version that the index has in benchmarks/selftest/cuda-fake.txt"; exit 1; }; \
	touch $@
