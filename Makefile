# Entry point for all tasks. `make setup` needs only make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The packages: cpu, or gpu after `make setup LOCK=gpu`, or gpu-0.33 after `make setup LOCK=gpu-0.33`.
LOCK ?= $(or $(patsubst $(VENV)/ready-%,%,$(firstword $(wildcard $(VENV)/ready-*))),cpu)
READY := $(VENV)/ready$(addprefix -,$(filter-out cpu,$(LOCK)))
# Two processes, with tests divided by tests/lanes.py. Each runs its own Fovea, which needs about 4 GB.
LANES := --numprocesses 2 --dist loadscope --no-loadscope-reorder
# Bytecode is compiled at installation. Without it, every process of the platform starts three times slower.
unexport PYTHONDONTWRITEBYTECODE
# Idle OpenMP threads must sleep: spinning on busy cores made a build use seven times the CPU time.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export PATH := $(CURDIR)/$(BIN):$(PATH)

# The folders of the packages, for a machine on which Fovea is not installed.
SOURCES := $(CURDIR):$(CURDIR)/client:$(CURDIR)/gateway:$(CURDIR)/services/renderer:$(CURDIR)/services/sampler:$(CURDIR)/services/trainer:$(CURDIR)/services/shared:$(CURDIR)/libraries:$(CURDIR)/tools

.DEFAULT_GOAL := help
.PHONY: help setup demo real rl up test long fuzz lint check chaos simulate conformance cookbook models clients k8s images environments format e2e gpu bench protos chart lock audit sbom wheel clean

help: ## Show this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY) ## Install all dependencies into .venv, pinned and hash-checked (LOCK=gpu: for GPUs; LOCK=gpu-0.33: with vLLM 0.33)

$(READY): requirements/$(LOCK).txt requirements/uv.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Fovea needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make setup PYTHON=python3.11")'
	@echo "setup: making the environment $(VENV) and installing uv into it"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/uv.txt
	@echo "setup: downloading, installing and compiling $$(grep -c '^[^ #].*==' requirements/$(LOCK).txt) packages; about 2 minutes the first time"
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync $$([ -t 2 ] || echo --quiet) --require-hashes --compile-bytecode requirements/$(LOCK).txt
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	@rm -f $(VENV)/ready $(VENV)/ready-*
	@touch $@
	@echo "setup: done; \`. $(VENV)/bin/activate\` puts fovea on the path"

demo: setup ## Train a tiny VLM on real digits; writes demo/report.html and demo/result.json
	$(BIN)/python -m fovea_demo

real: setup ## Teach a really pretrained model of 135M parameters to speak and to calculate; writes real/report.html
	$(BIN)/python -m fovea_real

rl: setup ## Run all reinforcement learning examples against their targets (3 h on 2 cores); writes examples/results.json
	$(BIN)/python -m examples

up: setup ## Start Fovea on this machine with the tiny model (options: fovea up --help)
	$(BIN)/fovea up

test: setup ## Run unit, contract and end-to-end tests against real services
	$(BIN)/python -m pytest $(LANES) -m "not long"

long: setup ## Run the long variants of shorter tests; daily and before a release
	$(BIN)/python -m pytest $(LANES) -m long

fuzz: setup ## Send 100,000 mutated requests, images, losses and files to real processes (FOVEA_FUZZ_INPUTS=N)
	FOVEA_FUZZ_INPUTS=$${FOVEA_FUZZ_INPUTS:-100000} $(BIN)/python -m pytest -s tests/fuzz

lint: setup ## Check format, lint, types, imports and protos
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

check: lint ## Run lint and unit tests, for fast feedback
	$(BIN)/python -m pytest -q $(LANES) tests/unit -m "not slow"

cookbook: setup ## Run the real tinker-cookbook's recipes against Fovea, in separate client environments
	$(BIN)/python -m cookbook

environments: setup ## Test the adapters for `verifiers` and OpenEnv with the real packages, installed next to .venv
	$(BIN)/uv pip install --quiet --require-hashes --target .environments/site-packages -r requirements/environments.txt
	PYTHONPATH=.environments/site-packages $(BIN)/python -m pytest -W default $(addprefix tests/unit/fovea_rollout/test_,verifiers_environment.py openenv_environment.py)

conformance: setup ## Run all checks of the Tinker API against a fresh Fovea; writes docs/reference/conformance.json and the matrix
	$(BIN)/python -m fovea_conformance.fresh --cookbook --json docs/reference/conformance.json --html .fovea/conformance.html
	$(BIN)/python -m fovea_conformance.matrix

# SEED=7 draws other faults, REPLAY=.../faults.jsonl repeats those of an earlier run, FAULTS=20 makes fewer.
chaos: setup ## Inject 200 faults in an hour while clients train and sample, and check every promise (SEED=7, REPLAY=log, SHARDS=1 for two gateways)
	$(BIN)/python -m chaos --seed $(or $(SEED),1) --faults $(or $(FAULTS),200) $(if $(REPLAY),--replay $(REPLAY)) $(if $(SHARDS),--shards)

simulate: setup ## Simulate 10,000 seeds of a gateway with virtual clock, network and disk, kills included (SEEDS=200, SEED=7 for one, SHARDS=1 for two gateways)
	$(BIN)/python -m chaos.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000)) $(if $(SHARDS),--gateways 2 --trainers 2)

soak: setup ## Run eight clients for hours and measure memory and latencies (HOURS=2)
	$(BIN)/python -m chaos.soak --hours $(or $(HOURS),2)

models: setup ## Check all model families on tiny checkpoints (20 min); writes docs/reference/models.md
	$(BIN)/python -m fovea_parity.page

clients: setup ## Build gRPC clients in other languages and compare their samples with Python's
	$(BIN)/python -m examples.clients

k8s: setup ## Test the Helm chart on a real API server with simulated nodes and a real one (first build with Go: 1 h)
	$(BIN)/python -m deploy.cluster build
	$(BIN)/python -m pytest tests/k8s -v

images: setup ## Build the four images with podman as root, and run deploy/compose.yaml from them
	$(BIN)/python -m deploy.images build
	$(BIN)/python -m pytest tests/images -v

chart: setup ## Regenerate schema, golden files and reference pages after a change of settings, metrics, commands or chart
	$(BIN)/python -m deploy.helm.schema
	$(BIN)/python -m deploy.settings_page
	$(BIN)/python -m deploy.metrics_page
	$(BIN)/python -m deploy.cli_page
	$(BIN)/python -m tests.unit.deploy.chart

format: setup ## Format the code and apply the linter's fixes
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

e2e: setup ## Run only the end-to-end tests
	$(BIN)/python -m pytest $(LANES) tests/e2e

gpu: ## On a machine with GPUs: test training, pushes and agreement in bfloat16, one Fovea per layout (FOVEA_GPU_SHAPE=4b)
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),python3) -m pytest tests/gpu -v

bench: setup ## Run the benchmarks that need no GPU; writes JSON lines to tools/benchmarks/results/
	sh tools/benchmarks/cpu.sh

protos: setup ## Regenerate the gRPC stubs, and check v1 for breaking changes against main
	$(BIN)/buf lint
	$(BIN)/python protos/generate.py
	$(BIN)/buf breaking --against '.git#branch=main'

lock: setup ## Update the pinned packages after a change of pyproject.toml
	for name in cpu gpu gpu-0.33; do \
		instead=; test ! -f requirements/$$name.in || instead="--no-config --override requirements/$$name.in"; \
		$(BIN)/uv pip compile pyproject.toml --extra $${name%%-*} $$instead --group dev --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate --quiet \
		--output-file requirements/$$name.txt || exit 1; done
	for tool in uv audit; do $(BIN)/uv pip compile requirements/$$tool.in --python-version 3.11 --python-platform \
		x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet \
		--output-file requirements/$$tool.txt || exit 1; done

audit: setup ## Check the pinned packages for published vulnerabilities; exit code 3 if the advisories cannot be reached
	$(BIN)/python -m deploy.audit check

sbom: setup ## Write the pinned packages as CycloneDX files to dist/
	$(BIN)/python -m deploy.audit sbom dist

wheel: setup ## Build the package into dist/: the client, and with the extra cpu or gpu also the services
	$(BIN)/uv build --quiet --wheel --out-dir dist

clean: ## Remove generated files, including the environment
	rm -rf $(VENV) dist .cookbook .mypy_cache .ruff_cache .pytest_cache .fovea demo/report.html demo/result.json real
