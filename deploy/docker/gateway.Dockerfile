# The gateway, without torch and GPU libraries. Build it from the repository root:
#   docker build -f deploy/docker/gateway.Dockerfile -t fovea/gateway:0.1.0 .
# A release pins the base image by digest: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:...
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 VIRTUAL_ENV=/opt/fovea
WORKDIR /build
COPY requirements/uv.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement uv.txt && uv venv /opt/fovea
COPY requirements/cpu.txt deploy/docker/gateway.in ./
# The fsspec driver for the bucket with the checkpoints; it must match the pinned packages.
ARG STORAGE=""
# uv also checks the hashes of a constraints file.
RUN uv pip install --constraint cpu.txt --requirement gateway.in ${STORAGE:+"${STORAGE}"}

FROM ${BASE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp fovea \
    && install --directory --owner fovea --group fovea /checkpoints /var/lib/fovea
COPY --from=build /opt/fovea /opt/fovea
WORKDIR /app
COPY fovea fovea
COPY fovea_gateway fovea_gateway
RUN python -m compileall -q fovea fovea_gateway
ENV PATH=/opt/fovea/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
EXPOSE 8000 50050 9090
ENTRYPOINT ["python", "-m", "fovea_gateway"]
