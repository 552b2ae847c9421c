# The one door. `make setup` needs Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes, as tests/lanes.py divides: each runs a Fovea of its own, of some 4 GB.
LANES := --numprocesses 2 --dist loadscope --no-loadscope-reorder
# Bytecode is compiled at install; without it every process of the platform starts three times slower.
unexport PYTHONDONTWRITEBYTECODE
# Idle OpenMP threads must sleep: spinning on busy cores made a build take seven times the processor time.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo rl up test long fuzz lint check chaos simulate conformance cookbook models clients k8s images environments format e2e gpu bench protos chart lock audit sbom wheel clean

help: ## Show this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(VENV)/ready ## Install everything into .venv, pinned and hash-checked

$(VENV)/ready: requirements/cpu.txt requirements/uv.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Fovea needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/uv.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode requirements/cpu.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	touch $@

demo: setup ## A tiny VLM learns real digits; writes demo/report.html and demo/result.json
	$(BIN)/python -m fovea_demo

rl: setup ## Reinforcement learning: all examples, each with its bar, three hours on two cores; writes examples/results.json, curves and pages
	$(BIN)/python -m examples

up: setup ## Start Fovea on this machine with the tiny model (fovea up --help for more)
	$(BIN)/fovea up

test: setup ## Everything: unit, contract and end to end, on real parts
	$(BIN)/python -m pytest $(LANES) -m "not long"

long: setup ## What takes minutes and shows at length what a shorter test shows too: every day, and before a release
	$(BIN)/python -m pytest $(LANES) -m long

fuzz: setup ## 100,000 mutated requests, images, losses and files at real processes (FOVEA_FUZZ_INPUTS for more)
	FOVEA_FUZZ_INPUTS=$${FOVEA_FUZZ_INPUTS:-100000} $(BIN)/python -m pytest -s tests/fuzz

lint: setup ## Format, lint, types, imports, protos
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

check: lint ## The fast inner loop: lint and the unit tests
	$(BIN)/python -m pytest -q $(LANES) tests/unit -m "not slow"

cookbook: setup ## The real tinker-cookbook's recipes against Fovea, in client environments of their own
	$(BIN)/python -m cookbook

environments: setup ## The adapters for `verifiers` and OpenEnv on the real packages, which lie beside .venv
	$(BIN)/uv pip install --quiet --require-hashes --target .environments/site-packages -r requirements/environments.txt
	PYTHONPATH=.environments/site-packages $(BIN)/python -m pytest -W default $(addprefix tests/unit/fovea_rollout/test_,verifiers_environment.py openenv_environment.py)

conformance: setup ## All checks of the Tinker API against a fresh Fovea; writes docs/reference/conformance.json and the matrix
	$(BIN)/python -m fovea_conformance.fresh --cookbook --json docs/reference/conformance.json --html .fovea/conformance.html
	$(BIN)/python -m fovea_conformance.matrix

# SEED=7 for other faults, REPLAY=.../faults.jsonl for those of a run before, FAULTS=20 for fewer.
chaos: setup ## 200 faults in an hour while clients train and sample, and every promise checked (SEED=7, REPLAY=log)
	$(BIN)/python -m chaos --seed $(or $(SEED),1) --faults $(or $(FAULTS),200) $(if $(REPLAY),--replay $(REPLAY))

simulate: setup ## 10,000 seeds of a gateway on a made-up clock, network and disk, killed and restarted (SEEDS=200, SEED=7 for one)
	$(BIN)/python -m chaos.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

soak: setup ## Hours of ordinary work of eight clients: memory and latencies (HOURS=2)
	$(BIN)/python -m chaos.soak --hours $(or $(HOURS),2)

models: setup ## Which model families work, each on a tiny checkpoint; writes docs/reference/models.md, twenty minutes
	$(BIN)/python -m fovea_parity.page

clients: setup ## gRPC clients in other languages: built by their own tool chains, compared with what Python samples
	$(BIN)/python -m examples.clients

k8s: setup ## The Helm chart on a real API server, built with Go at first (forty minutes): nodes simulated, and one real
	$(BIN)/python -m deploy.cluster build
	$(BIN)/python -m pytest tests/k8s -v

images: setup ## The four images, built by podman as root, and deploy/compose.yaml run from them
	$(BIN)/python -m deploy.images build
	$(BIN)/python -m pytest tests/images -v

chart: setup ## After a change of settings, metrics or chart: write its schema, golden files and reference pages anew
	$(BIN)/python -m deploy.helm.schema
	$(BIN)/python -m deploy.settings_page
	$(BIN)/python -m deploy.metrics_page
	$(BIN)/python -m deploy.cli_page
	$(BIN)/python -m tests.unit.deploy.chart

format: setup ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

e2e: setup ## End-to-end tests alone
	$(BIN)/python -m pytest $(LANES) tests/e2e

gpu: ## On a machine with GPUs: training, pushes and agreement in bfloat16, one Fovea per layout (FOVEA_GPU_SHAPE=4b for more)
	$(or $(wildcard $(BIN)/python),python3) -m pytest tests/gpu -v

bench: setup ## The benchmarks that need no GPU, one after another; JSON lines into benchmarks/results/
	sh benchmarks/cpu.sh

protos: setup ## Regenerate the stubs, and check that v1 did not break against main
	$(BIN)/buf lint
	$(BIN)/python protos/generate.py
	$(BIN)/buf breaking --against '.git#branch=main'

lock: setup ## Pin anew after a change of pyproject.toml
	for extra in cpu gpu; do $(BIN)/uv pip compile pyproject.toml --extra $$extra --group dev --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate --quiet \
		--output-file requirements/$$extra.txt || exit 1; done
	for tool in uv audit; do $(BIN)/uv pip compile requirements/$$tool.in --python-version 3.11 --python-platform \
		x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet \
		--output-file requirements/$$tool.txt || exit 1; done

audit: setup ## Look up the pinned packages among the published vulnerabilities; 3 where the advisories cannot be reached
	$(BIN)/python -m deploy.audit check

sbom: setup ## The pinned packages as CycloneDX files, into dist/
	$(BIN)/python -m deploy.audit sbom dist

wheel: setup ## The package, into dist/: a client by itself, with the extras cpu or gpu the services too
	$(BIN)/uv build --quiet --wheel --out-dir dist

clean: ## Remove what was made here, the environment included
	rm -rf $(VENV) dist .cookbook .mypy_cache .ruff_cache .pytest_cache .fovea demo/report.html demo/result.json
