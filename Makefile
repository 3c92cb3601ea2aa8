# `make demo` and `make test` need Python >= 3.11 and nothing else prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(wildcard protos/chitu_diffusion/v1/*.proto)
GENERATE = $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: help setup demo test test-slow test-gpu check format protos bench clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(READY)  ## Make .venv with pinned dependencies.

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	touch $@

demo: $(READY)  ## Generate a video with the tiny model: out/demo.mp4 and out/demo.png.
	$(BIN)/chitu-diffusion generate "a red circle moving left on a black background" \
		--seed 7 -o out/demo.mp4 --contact-sheet out/demo.png --report out/demo.json

test: $(READY)  ## Run the tests.
	$(BIN)/python -m pytest

test-slow: $(READY)  ## Run the long test matrices.
	$(BIN)/python -m pytest -m slow --timeout=1200

test-gpu: $(READY)  ## Run the tests that need a CUDA device.
	$(BIN)/python -m pytest -m gpu --timeout=1200

check: $(READY)  ## Format, lint, types, import contracts, protos.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	rm -rf out/stubs && mkdir -p out/stubs
	PATH=$(BIN):$$PATH $(call GENERATE,out/stubs)
	touch out/stubs/chitu_diffusion/v1/__init__.py
	diff -r -x __pycache__ out/stubs/chitu_diffusion/v1 chitu_diffusion/v1 || \
		{ echo "the stubs are stale: run 'make protos'"; exit 1; }

format: $(READY)  ## Format the code and mend what can be mended.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format --write

protos: $(READY)  ## Regenerate the stubs.
	PATH=$(BIN):$$PATH $(call GENERATE,.)

bench: $(READY)  ## Run the benchmarks.
	$(BIN)/python -m benchmarks

clean:  ## Remove what was made.
	rm -rf $(VENV) out
