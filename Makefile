# One command from a fresh machine to a trained model:  make train
#
#   make train   a virtual environment, all it needs, then the quickstart experiment
#   make test    the same environment with the test tools, then the tests
#   make lint    ruff, and the linters of the shell scripts and the Dockerfile
#   make docker  the image for DGX clusters (docs/operations.md)
#   make bench   kernel benchmarks of this machine
#
# Which torch: TORCH names the requirement, TORCH_INDEX the package index it comes from (README, "Which torch").

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
CUDA := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
TORCH ?= $(if $(CUDA),torch>=2.11$(comma)<2.15,torch==2.13.0)
TORCH_INDEX ?=
RUN_ARGS ?=
DOCKER_TAG ?= nvfp4_train
DOCKER_BASE ?=
DOCKER_UID ?=
comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test lint bench docker clean

train: $(VENV)/.installed
	$(BIN)/python -m nvfp4_train.pretrain +experiment=quickstart $(RUN_ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run $(wildcard scripts/*/*.sh scripts/*/*.sbatch)
	$(BIN)/hadolint Dockerfile

bench: $(VENV)/.installed
	$(BIN)/python kernels/benchmarks/quantize.py

docker:
	docker build --tag $(DOCKER_TAG) $(if $(DOCKER_BASE),--build-arg BASE=$(DOCKER_BASE)) $(if $(DOCKER_UID),--build-arg UID=$(DOCKER_UID)) .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and was not found; name one with PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that nothing else decides which build is taken.
$(VENV)/.torch: | $(BIN)/python
	@echo "Installing $(TORCH) $(if $(TORCH_INDEX),from $(TORCH_INDEX),from the default index)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.torch
	@echo "Installing nvfp4_train and what it needs"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.torch
	@echo "Installing nvfp4_train with its test tools"
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps transformer-engine==2.20.2  # 1.2 MB of Python: the reference that tests compare with, not its library
	@touch $@ $(VENV)/.installed
