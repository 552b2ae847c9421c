# The sampler: vLLM on GPUs. EXTRA=cpu installs vLLM's CPU build instead. Build it from the repository root:
#   docker build -f deploy/docker/sampler.Dockerfile --build-arg EXTRA=gpu -t fovea/sampler:0.1.0 .
# A release pins the base image by digest: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:...
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 VIRTUAL_ENV=/opt/fovea
WORKDIR /build
COPY requirements/uv.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement uv.txt && uv venv /opt/fovea
ARG EXTRA=gpu
COPY pyproject.toml requirements/${EXTRA}.txt ./
# uv also checks the hashes of a constraints file, and reads the overrides of this pyproject.toml.
RUN uv pip install --constraint "${EXTRA}.txt" --requirement pyproject.toml --extra "${EXTRA}"

FROM ${BASE}
# Kernels are compiled on first use; vLLM's CPU build links libnuma. Debian removes old versions, so nothing is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --no-create-home --home-dir /tmp fovea \
    && install --directory --owner fovea --group fovea /models
COPY --from=build /opt/fovea /opt/fovea
WORKDIR /app
COPY fovea fovea
COPY fovea_services/__init__.py fovea_services/weight_transfer.py fovea_services/random_weights.py fovea_services/
COPY fovea_services/sampler fovea_services/sampler
RUN python -m compileall -q fovea fovea_services
# Not a secret: hadolint finds "token" in TOKENIZERS_PARALLELISM.
# hadolint ignore=DL3064
ENV PATH=/opt/fovea/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models/huggingface \
    OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50052 9090
ENTRYPOINT ["python", "-m", "fovea_services.sampler"]
