"""Prometheus series of the sampler itself; vLLM adds its own `vllm:*` to the same page."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("fovea_sampler_requests_total", "Sample requests by how they ended.", ["outcome"])
IN_FLIGHT = Gauge("fovea_sampler_requests_in_flight", "Sample requests that have not ended.")
TOKENS = Counter("fovea_sampler_tokens_total", "Tokens of finished and streamed work.", ["kind"])
FEATURES = Counter("fovea_sampler_features_total", "Look-ups of vision tensors in the cache.", ["result"])
FEATURE_BYTES = Gauge("fovea_sampler_feature_bytes", "Size of the vision tensors in the cache.")
SNAPSHOTS = Counter("fovea_sampler_snapshots_total", "Snapshots received, by kind and outcome.", ["kind", "outcome"])
ADAPTERS = Gauge("fovea_sampler_adapters", "Adapters that are held.")
PAUSE_SECONDS = Histogram(
    "fovea_sampler_pause_seconds",
    "Seconds that generation stood still for new weights.",
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)
