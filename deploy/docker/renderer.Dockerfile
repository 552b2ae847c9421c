# The renderer: transformers' image processors on CPUs. Build it from the repository root:
#   docker build -f deploy/docker/renderer.Dockerfile -t fovea/renderer:0.1.0 .
# A release pins the base image by digest: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:...
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 VIRTUAL_ENV=/opt/fovea
WORKDIR /build
COPY requirements/uv.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement uv.txt && uv venv /opt/fovea
COPY pyproject.toml requirements/cpu.txt ./
# uv also checks the hashes of a constraints file.
RUN uv pip install --constraint cpu.txt --requirement pyproject.toml --extra serve

FROM ${BASE}
# First, and identical in renderer and trainer, so that both share this layer.
COPY --from=build /opt/fovea /opt/fovea
RUN useradd --uid 10001 --no-create-home --home-dir /tmp fovea \
    && install --directory --owner fovea --group fovea /models
WORKDIR /app
COPY fovea fovea
COPY fovea_services/__init__.py fovea_services/__init__.py
COPY fovea_services/renderer fovea_services/renderer
RUN python -m compileall -q fovea fovea_services
# Not a secret: hadolint finds "token" in TOKENIZERS_PARALLELISM.
# hadolint ignore=DL3064
ENV PATH=/opt/fovea/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models/huggingface \
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false
USER 10001:10001
EXPOSE 50051 9090
ENTRYPOINT ["python", "-m", "fovea_services.renderer"]
