# The trainer: FSDP2, one process per rank, on GPUs or CPUs. Build it from the repository root:
#   docker build -f deploy/docker/trainer.Dockerfile -t fovea/trainer:0.1.0 .
# A release pins the base image by digest: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:...
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 VIRTUAL_ENV=/opt/fovea
WORKDIR /build
COPY requirements/uv.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement uv.txt && uv venv /opt/fovea
COPY pyproject.toml requirements/cpu.txt ./
# uv also checks the hashes of a constraints file. torch is the same for CPU and GPU; the files differ only in vLLM.
RUN uv pip install --constraint cpu.txt --requirement pyproject.toml --extra serve
# The fsspec driver for the bucket with the checkpoints; it must match the pinned packages.
ARG STORAGE=""
RUN test -z "${STORAGE}" || uv pip install --constraint cpu.txt "${STORAGE}"

FROM ${BASE}
# First, and identical in renderer and trainer, so that both share this layer.
COPY --from=build /opt/fovea /opt/fovea
# Triton compiles kernel launchers on first use. Debian removes old versions, so nothing is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --no-create-home --home-dir /tmp fovea \
    && install --directory --owner fovea --group fovea /checkpoints /models
WORKDIR /app
COPY fovea fovea
COPY fovea_services/__init__.py fovea_services/weight_transfer.py fovea_services/random_weights.py fovea_services/
COPY fovea_services/trainer fovea_services/trainer
RUN python -m compileall -q fovea fovea_services
# Not a secret: hadolint finds "token" in TOKENIZERS_PARALLELISM.
# hadolint ignore=DL3064
ENV PATH=/opt/fovea/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models/huggingface \
    OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50053 9090 29500
ENTRYPOINT ["python", "-m", "fovea_services.trainer"]
