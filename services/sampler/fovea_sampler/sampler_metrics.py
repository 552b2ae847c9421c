"""Prometheus metrics of the sampler. vLLM adds its own `vllm:*` metrics to the same page."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("fovea_sampler_requests_total", "Sample requests, by outcome.", ["outcome"])
IN_FLIGHT = Gauge("fovea_sampler_requests_in_flight", "Sample requests that have not ended yet.")
TOKENS = Counter(
    "fovea_sampler_tokens_total",
    "Prompt tokens, prompt tokens from the prefix cache, and sampled tokens, by kind.",
    ["kind"],
)
FEATURES = Counter("fovea_sampler_features_total", "Lookups of vision tensors in the cache, by result.", ["result"])
FEATURE_BYTES = Gauge("fovea_sampler_feature_bytes", "Bytes of vision tensors in the cache.")
SNAPSHOTS = Counter("fovea_sampler_snapshots_total", "Snapshots received, by kind and outcome.", ["kind", "outcome"])
RECEIVED_BYTES = Counter(
    "fovea_sampler_received_bytes_total",
    "Bytes of snapshots that arrived at each worker. Of full parameters, a worker receives the parts that it holds.",
    ["worker"],
)
ADAPTERS = Gauge("fovea_sampler_adapters", "Adapters that the sampler holds.")
PAUSE_SECONDS = Histogram(
    "fovea_sampler_pause_seconds",
    "Seconds for which generation paused to load full weights.",
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)
WAITING_FOR_SLOT = Gauge(
    "fovea_sampler_requests_waiting_for_slot", "Sample requests that wait until another adapter leaves its slot."
)
SLOT_WAIT_SECONDS = Histogram(
    "fovea_sampler_slot_wait_seconds",
    "Seconds for which a sample request waited for a slot; requests that did not wait are not counted.",
    buckets=(0.01, 0.05, 0.2, 1, 5, 20, 60),
)
