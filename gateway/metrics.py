"""Prometheus metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800)

SUBMITTED = Counter("fovea_gateway_futures_submitted_total", "Accepted submissions by kind.", ["kind"])
FINISHED = Counter("fovea_gateway_futures_finished_total", "Finished futures by kind and reason.", ["kind", "reason"])
PENDING = Gauge("fovea_gateway_futures_pending", "Futures that have not ended.")
FUTURE_SECONDS = Histogram(
    "fovea_gateway_future_seconds", "Seconds from submission to outcome.", ["kind"], buckets=_SECONDS
)
REQUESTS = Counter("fovea_gateway_rest_requests_total", "REST requests by route and status.", ["route", "status"])
REQUEST_SECONDS = Histogram(
    "fovea_gateway_rest_request_seconds", "Seconds of a REST request, long polls left out.", ["route"], buckets=_SECONDS
)
SAMPLES_RUNNING = Gauge("fovea_gateway_samples_running", "Sample requests now in a sampler.", ["sampler"])
SAMPLE_RETRIES = Counter("fovea_gateway_sample_retries_total", "Samples that were tried again, by reason.", ["reason"])
PUSHES = Counter("fovea_gateway_snapshot_pushes_total", "Pushes of snapshots to samplers by outcome.", ["outcome"])
PUSH_SECONDS = Histogram("fovea_gateway_snapshot_push_seconds", "Seconds of a push.", buckets=_SECONDS)
REPLICAS = Gauge("fovea_gateway_replicas", "Replicas by service: known to discovery, and up.", ["service", "state"])
RENDER_RETRIES = Counter("fovea_gateway_render_retries_total", "Renders that were tried again, by reason.", ["reason"])
