# make train   train the example model over NPROC processes        make train NPROC=2 ARGS="--text book.txt"
# make test    run the tests, but for those marked slow            make test ARGS="tests/kernels -k silu"
# make test-all    run all tests, the slow ones too: they compile every kernel and train models for minutes
# make test-exhaustive    run the rest of the grids of which test-all runs a part
# make test-parallel-registry    the part of test-all that needs transformers 5.23
# make fuzz    random configurations, misuse, faults and folders   make fuzz SECONDS=600 ARGS="--ranks 2 4 --seed 7"
# make cluster-test    two hosts, imitated by network namespaces or else on the loopback interface
# make lint    what CI checks: format, rules, types, spelling      make format repairs the first two
# make clean   remove .venv and caches (runs/ stays)
#
# Needs make and Python >= 3.11, nothing else: .venv is made and filled on first use. Another interpreter:
# make PYTHON=python3.12 train. pip's own settings (PIP_INDEX_URL, ...) apply as usual.

PYTHON ?= python3
NPROC ?= 4
ARGS ?=
# Processes that run tests, each of which starts ranks of its own.
WORKERS ?= 2
# How long make fuzz runs.
SECONDS ?= 60

VENV := .venv
RUN := $(VENV)/bin/python
# The stamp's name carries the content of both files: when that changes, and only then, make installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
PIP := $(RUN) -m pip --disable-pip-version-check install --constraint constraints.txt
# An environment inside of the first, whose packages it sees, but for its own transformers.
NEWER := $(VENV)/transformers-5.24.0

# One thread a process: NPROC of them share the cores.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes of the tests import the same modules: the first one compiles them for all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-compiled test-parallel-registry test-exhaustive fuzz cluster-test lint format clean

# The first command finds mistakes in ARGS alone, so that they are not printed by every process and the launcher.
train: $(STAMP)
	@WORLD_SIZE=$(NPROC) LOCAL_WORLD_SIZE=$(NPROC) $(RUN) examples/train.py --check $(ARGS)
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train.py $(ARGS)

# In the order of tests/conftest.py, not by the number of tests in a file: files with slow tests come first.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(RUN) -m pytest $(if $(ARGS),$(ARGS),$(PARALLEL) -m "not slow and not exhaustive")

test-all: $(STAMP) test-compiled test-parallel-registry
	$(RUN) -m pytest $(PARALLEL) -m "not exhaustive"

# Without a GPU, Triton's kernels are interpreted in the other runs, and what is interpreted cannot be compiled. These
# tests compile the launches of their own process.
test-compiled: $(STAMP)
	TRITON_INTERPRET=0 $(RUN) -m pytest tests/kernels/route/test_router_compile.py tests/kernels/route/test_select_compile.py

# DeepSpeed's AutoEP cannot use the transformers that has expert parallelism.
REGISTRY := $(NEWER)/bin/python -m pytest tests/integrations/transformers tests/examples tests/benchmarks

test-parallel-registry: $(NEWER)/.installed
	$(REGISTRY) $(PARALLEL) -m "parallel_registry and not exhaustive"

test-exhaustive: $(NEWER)/.installed
	$(RUN) -m pytest -m exhaustive
	$(REGISTRY) -m "parallel_registry and exhaustive"

fuzz: $(STAMP)
	$(RUN) -m tests.fuzz --seconds $(SECONDS) $(ARGS)

# The first line of output says how the hosts are imitated.
cluster-test: $(STAMP)
	@$(RUN) -m tests.cluster.imitated_hosts
	$(RUN) -m pytest tests/cluster $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m basedpyright --pythonpath $(RUN)
	$(VENV)/bin/codespell
	$(VENV)/bin/shellcheck .ci/run examples/cluster/*.sh examples/cluster/*.sbatch

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: any other package could pull in a newer one. A torch built for CUDA brings the Triton it
# needs; the CPU build has none and gets the oldest that we support. The build backends, ours and DeepSpeed's, are
# installed from the constraints too, so that nothing is resolved outside of them. Megatron-Core has wheels for Python 3.12
# alone, of which all that the tests import is plain Python that runs under 3.11 too: there pip unpacks one. datasets
# before 4.8, the last that torchtitan takes, asks for older fsspec and huggingface-hub than constraints.txt has, and
# works with these: so it, torchtitan and TRL come without what they ask for.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "sonic_ep needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
		echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing into $(VENV) (once; torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(RUN) -m pip --quiet show triton >/dev/null 2>&1 || $(PIP) --quiet 'triton==3.6.0; sys_platform == "linux"'
	$(PIP) --quiet hatchling setuptools wheel
	$(PIP) --quiet --no-build-isolation --editable '.[dev,train]'
	[ "$$(uname)" != Linux ] || $(PIP) --quiet --no-deps torchtitan trl datasets
	$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 12) and sys.platform == "linux")' || { \
		$(RUN) -m pip --quiet uninstall --yes megatron-core && \
		$(PIP) --quiet --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 --upgrade \
			--target "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" megatron-core; }
	@rm -f $(VENV)/.installed-*
	@touch $@

$(NEWER)/.installed: $(STAMP)
	$(PYTHON) -m venv --without-pip $(NEWER)
	$(RUN) -c 'import sys, sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(NEWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	$(RUN) -m pip --disable-pip-version-check --python $(NEWER)/bin/python install --quiet --no-deps transformers==5.24.0
	@touch $@
