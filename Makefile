# Eyrie's two commands are `make` (the default build) and `make test`; each sets up all it needs.
# `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TARGET := models/smollm2-135m-instruct
TINY := models/tiny
# vLLM pins other versions of what .venv holds.
VLLM := .venv-vllm
# speculators, whose trainer the tests compare ours with, does so too.
ORACLE := .venv-oracle
# Scans the other environments' pins, and needs none of them.
AUDIT := .venv-audit
# More for scripts/plan_build.py: make plan PLAN="--rate 2500"
PLAN ?=
# Tests run two at a time; `make test WORKERS=` runs them one after the other.
WORKERS ?= --numprocesses 2 --dist loadfile
# More for Snakemake: make ARGS="--cores 1 openthoughts"
ARGS ?= --cores all
# The image, what it is built on, and the wheels for that base's Python. An empty BASE_IMAGE is the Dockerfile's.
IMAGE ?= eyrie
BASE_IMAGE ?=
PYTHON_VERSION ?= 3.12
DEVICE ?= cuda
DOCKER ?= docker
export DOCKER
# More for `make run`: RUN_ARGS="--gpus device=0,1 --mount /data"
RUN_ARGS ?=
REVISION = $(shell git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# pip's own checks for a newer pip say nothing about this build.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

export PATH := $(abspath $(BIN)):$(PATH)
# Nothing is fetched from a hub at run time unless a dataset's source says so.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build test test-fast lint catalogue real vllm vllm-env serve-check oracle-env browser-env plan preflight audit unlock gc schema clean help
.PHONY: wheels image run shell stop test-container

build: $(BIN)/.ready $(TARGET)/SOURCE.json ## Build everything of config.yaml: drafter, evaluation, report
	@python scripts/unlock.py
	snakemake $(ARGS)

plan: $(BIN)/.ready ## Say what `make` would do and why, and what it takes: requests, tokens, hours, bytes
	@python scripts/plan_build.py $(PLAN) -- $(ARGS)

preflight: $(BIN)/.ready ## Check what a build needs of this machine, each with the mend: GPUs, disk, model, data, limits
	@python scripts/preflight.py -- $(ARGS)

audit: $(AUDIT)/.ready ## Look the pinned packages up in a database of known vulnerabilities
	@$(AUDIT)/bin/python scripts/audit_packages.py

test: $(BIN)/.ready-dev $(TARGET)/SOURCE.json ## Run all tests
	pytest $(WORKERS) -m "not container"

test-container: $(BIN)/.ready-dev $(TARGET)/SOURCE.json ## Build the image on a base made here, and builds in it; takes root, dockerd, mmdebstrap
	pytest -m container tests/container

test-fast: $(BIN)/.ready-dev ## Run the tests that take seconds
	pytest $(WORKERS) -m "not target and not build and not container"

lint: $(BIN)/.ready-dev ## Check style and types
	ruff check
	ruff format --check
	mypy scripts
	snakefmt --check Snakefile rules
	hadolint Dockerfile

catalogue: $(BIN)/.ready-dev ## Print the table of malformed and tricky inputs and what becomes of each
	python tests/catalogue/table.py

real: $(BIN)/.ready-dev $(TARGET)/SOURCE.json ## Build a drafter from the public rows in ../shared/real, and check their counts
	pytest -m real
	@python scripts/unlock.py
	snakemake --cores all --configfile configs/real.yaml

VLLM_CONFIG := config.yaml configs/vllm.yaml
TOKENIZED := smollm2-135m-instruct/tokenized
vllm: $(BIN)/.ready $(VLLM)/.ready $(TARGET)/SOURCE.json ## Answer the default build's prompts by a real vLLM, and compare with those in process
	@python scripts/unlock.py
	snakemake $(ARGS) responses
	python scripts/with_server.py --config $(VLLM_CONFIG) -- snakemake $(ARGS) responses --configfile $(VLLM_CONFIG)
	python scripts/compare_answers.py --ours work/$(TOKENIZED) --theirs work-vllm/$(TOKENIZED) \
		--target-path $(TARGET) --out work-vllm/comparison.json

serve-check: $(BIN)/.ready $(VLLM)/.ready $(TARGET)/SOURCE.json ## Have a real vLLM serve the default build's drafter, and compare with what Eyrie measures
	@python scripts/unlock.py
	snakemake $(ARGS) serving

vllm-env: $(VLLM)/.ready ## Set up the environment of the real vLLM: a download of about a gigabyte, 2.5 GB in all

oracle-env: $(ORACLE)/.ready ## Set up the environment of speculators 0.9.0, which the parity tests and the training benchmark need

browser-env: ## Install Chromium, in which the tests open the report, where it is missing: Debian's package, as root
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } \
		|| { echo "Chromium is missing and could not be installed: it takes root and Debian's packages" >&2; exit 1; }

wheels: $(BIN)/.ready ## Fetch the wheels that the image is built from, for PYTHON_VERSION and DEVICE (cpu or cuda)
	python scripts/fetch_wheels.py --out wheels --python $(PYTHON_VERSION) --device $(DEVICE)

image: ## Build the image IMAGE on BASE_IMAGE from wheels/
	@test -d wheels || { echo "saw no wheels/: make wheels PYTHON_VERSION=3.N DEVICE=cpu|cuda fetches them"; exit 1; }
	DOCKER_BUILDKIT=1 $(DOCKER) build $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) $(BUILD_ARGS) --tag $(IMAGE) .

run: ## Build in a container: make run ARGS="--cores all --configfile configs/kimi-k2.5.yaml"
	@$(PYTHON) scripts/run_container.py --image $(IMAGE) $(RUN_ARGS) -- $(ARGS)

shell: ## A shell in a container
	@$(PYTHON) scripts/run_container.py --image $(IMAGE) --name eyrie-shell $(RUN_ARGS) --shell

stop: ## End the running build gently, here and in the container
	@! $(DOCKER) container inspect eyrie >/dev/null 2>&1 || $(DOCKER) stop eyrie
	@test ! -x $(BIN)/python || python scripts/stop_build.py

unlock: $(BIN)/.ready ## Clear the lock that a killed build left, if nothing holds it
	@python scripts/unlock.py

gc: $(BIN)/.ready ## List what the store holds and no result needs; scripts/gc_store.py --delete deletes it
	@python scripts/unlock.py
	@python scripts/gc_store.py

schema: $(BIN)/.ready ## Write the configuration's JSON schema anew
	python scripts/write_schema.py --out schemas/config.schema.json

clean: ## Remove all results but the store: answers, states and drafters that were paid for
	rm -rf work/raw work/prompts work/logs work/benchmarks $(filter-out work/store,$(wildcard work/*)) .snakemake

help: ## List these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: what comes later then finds it in place and takes no other build of it.
$(BIN)/.ready: envs/cpu.txt | $(BIN)/python
	$(PIP) $$(grep '^torch==' envs/cpu.txt)
	$(PIP) -r envs/cpu.txt
	@touch $@

$(BIN)/.ready-dev: envs/dev.txt $(BIN)/.ready
	$(PIP) -r envs/dev.txt
	@touch $@

# Pinned as a whole, so that nothing is resolved: see envs/vllm.txt.
$(VLLM)/.ready: envs/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r envs/vllm.txt
	@touch $@

$(AUDIT)/.ready: envs/audit.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check -r envs/audit.txt
	@touch $@

# torch first and alone here, too; the rest is pinned as a whole: see envs/oracle.txt.
$(ORACLE)/.ready: envs/oracle.txt
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' envs/oracle.txt)
	$(ORACLE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r envs/oracle.txt
	@touch $@

$(TARGET)/SOURCE.json: | $(BIN)/.ready
	python scripts/fetch_target.py --out $(TARGET)
