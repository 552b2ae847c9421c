"""Prometheus metrics of the gateway, and the spans of a request's stages. Tenants are named by the owner of their API
key, never by the key.

The stages of a request:

queue     until its turn comes: earlier commands of its model, or a place in a sampler
turn      a loss or a step waits until its owner's share lets it to the trainer
render    images into tokens and tensors; a batch is rendered while it is still in the queue
weights   a sample waits until its snapshot is in the sampler
sample    in the sampler
train     in the trainer, its own queue included
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from fovea.runtime import tracing

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800)

SUBMITTED = Counter("fovea_gateway_futures_submitted_total", "Accepted submissions by kind.", ["kind"])
FINISHED = Counter("fovea_gateway_futures_finished_total", "Finished futures by kind and reason.", ["kind", "reason"])
PENDING = Gauge("fovea_gateway_futures_pending", "Futures that have not ended.")
QUEUE_DEPTH = Gauge(
    "fovea_gateway_queue_depth",
    "Futures that have not ended by model, tenant and state: waiting or running. A model without any has no series.",
    ["model", "tenant", "state"],
)
FUTURE_SECONDS = Histogram(
    "fovea_gateway_future_seconds", "Seconds from submission to outcome.", ["kind"], buckets=_SECONDS
)
STAGE_SECONDS = Histogram(
    "fovea_gateway_stage_seconds",
    "Seconds of a stage of a request: queue, turn, render, weights, sample, train.",
    ["stage", "kind"],
    buckets=_SECONDS,
)
REQUESTS = Counter("fovea_gateway_rest_requests_total", "REST requests by route and status.", ["route", "status"])
REQUEST_ERRORS = Counter(
    "fovea_gateway_rest_errors_total", "REST requests that failed, by route and reason.", ["route", "reason"]
)
REQUEST_SECONDS = Histogram(
    "fovea_gateway_rest_request_seconds", "Seconds of a REST request, long polls left out.", ["route"], buckets=_SECONDS
)
SAMPLES_RUNNING = Gauge("fovea_gateway_samples_running", "Sample requests now in a sampler.", ["sampler"])
WAITING = Gauge(
    "fovea_gateway_replica_waiting",
    "Requests that wait here for a place in a replica, which takes so many at once as the settings say.",
    ["service", "replica"],
)
SAMPLE_RETRIES = Counter("fovea_gateway_sample_retries_total", "Samples that were tried again, by reason.", ["reason"])
PUSHES = Counter("fovea_gateway_snapshot_pushes_total", "Pushes of snapshots to samplers by outcome.", ["outcome"])
PUSH_SECONDS = Histogram("fovea_gateway_snapshot_push_seconds", "Seconds of a push.", buckets=_SECONDS)
REPLICAS = Gauge(
    "fovea_gateway_replicas",
    "Replicas by service and base model: known to discovery, and up. A service that a base model is served without has"
    " no series.",
    ["service", "base_model", "state"],
)
RENDER_RETRIES = Counter("fovea_gateway_render_retries_total", "Renders that were tried again, by reason.", ["reason"])
VERSION_LAG = Gauge(
    "fovea_gateway_sampler_version_lag",
    "Versions that a sampler is behind what was asked for, of the model that is furthest behind.",
    ["sampler"],
)
TRAINER_RESTARTS = Counter("fovea_gateway_trainer_restarts_total", "Times that another trainer instance answered.")
JOURNAL_BYTES = Gauge("fovea_gateway_journal_bytes", "Requests kept until what they did is durable in the trainer.")
RESTORE_SECONDS = Histogram(
    "fovea_gateway_model_restore_seconds", "Seconds in which a model came back to the trainer.", buckets=_SECONDS
)
REPLAYED = Counter(
    "fovea_gateway_replayed_commands_total",
    "Commands run again for a trainer that restarted, by whether the answer was the client's: equal, different,"
    " or rounded, if the trainer has other numerics.",
    ["answer"],
)
for _answer in ("equal", "different", "rounded"):
    REPLAYED.labels(_answer)  # from 0 on: of a series that begins with 1, increase() does not see the first
RESULT_BYTES = Gauge("fovea_gateway_result_bytes", "What the database keeps of results, when they last were many.")
SESSIONS = Gauge("fovea_gateway_sessions", "Sessions that are open.")
PARKED = Gauge("fovea_gateway_parked_sessions", "Sessions that are parked.")
PARKED_BYTES = Gauge("fovea_gateway_parked_bytes", "What the trainer keeps on storage of parked sessions.")
STATE_BYTES = Gauge("fovea_gateway_state_volume_bytes", "The volume of the state folder: size and free.", ["kind"])


TOKENS = Counter(
    "fovea_gateway_tokens_total",
    "Tokens of finished requests by tenant and kind: trained, scored (losses without gradients), prompt, cached (of the"
    " prompts) and sampled.",
    ["tenant", "kind"],
)
GPU_SECONDS = Counter(
    "fovea_gateway_gpu_seconds_total",
    "Seconds of trainer and samplers by tenant and kind of request: its part of the time, by tokens, for each device.",
    ["tenant", "kind"],
)


def note_usage(tenant: str, kind: str, usage: Mapping[str, float]) -> None:
    """Counts what a request of this kind has used: tokens as `trained_tokens` and so on, and `gpu_seconds`."""
    for name, value in usage.items():
        if value and name.endswith("_tokens"):
            TOKENS.labels(tenant, name.removesuffix("_tokens")).inc(value)
    if usage["gpu_seconds"]:
        GPU_SECONDS.labels(tenant, kind).inc(usage["gpu_seconds"])


@contextmanager
def stage(name: str, kind: str) -> Iterator[None]:
    """Times one stage of a request of this kind, whether it succeeds or fails."""
    started = time.perf_counter()
    try:
        with tracing.span(name):
            yield
    finally:
        STAGE_SECONDS.labels(name, kind).observe(time.perf_counter() - started)


def queued(kind: str, since: float) -> None:
    """The queue stage, which ends now and began at `since`, seconds of `time.time`."""
    STAGE_SECONDS.labels("queue", kind).observe(max(time.time() - since, 0.0))
    tracing.record("queue", since)
