"""Prometheus metrics of the gateway, and the spans of a request's stages. A tenant is the owner of an API key; metrics
never contain keys.

The stages of a request:

queue     waiting for earlier commands of the model, or for a slot in a sampler
turn      a loss or a step waiting for its owner's turn at the trainer
render    converting images to tokens and tensors; a batch is rendered while it is still in the queue
weights   a sample waiting until its snapshot is in the sampler
sample    in the sampler
train     in the trainer, including its queue
"""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800)

SUBMITTED = Counter("fovea_gateway_futures_submitted_total", "Accepted submissions by kind.", ["kind"])
FINISHED = Counter("fovea_gateway_futures_finished_total", "Finished futures by kind and reason.", ["kind", "reason"])
PENDING = Gauge("fovea_gateway_futures_pending", "Unfinished futures.")
QUEUE_DEPTH = Gauge(
    "fovea_gateway_queue_depth",
    "Unfinished futures by model, tenant and state (waiting or running). A model without any has no series.",
    ["model", "tenant", "state"],
)
FUTURE_SECONDS = Histogram(
    "fovea_gateway_future_seconds",
    "Seconds from the submission of a future to its outcome.",
    ["kind"],
    buckets=_SECONDS,
)
STAGE_SECONDS = Histogram(
    "fovea_gateway_stage_seconds",
    "Seconds that a request spends in a stage: queue, turn, render, weights, sample, train.",
    ["stage", "kind"],
    buckets=_SECONDS,
)
REQUESTS = Counter("fovea_gateway_rest_requests_total", "REST requests by route and status.", ["route", "status"])
REQUEST_ERRORS = Counter(
    "fovea_gateway_rest_errors_total", "REST requests that failed, by route and reason.", ["route", "reason"]
)
REQUEST_SECONDS = Histogram(
    "fovea_gateway_rest_request_seconds", "Seconds of a REST request, without long polls.", ["route"], buckets=_SECONDS
)
SAMPLES_RUNNING = Gauge("fovea_gateway_samples_running", "Sample requests that are running in a sampler.", ["sampler"])
WAITING = Gauge(
    "fovea_gateway_replica_waiting",
    "Requests that wait in the gateway for a slot in a replica; the settings limit its concurrent requests.",
    ["service", "replica"],
)
REPLICA_TOKENS = Gauge(
    "fovea_gateway_replica_tokens",
    "Tokens of the requests that wait for a slot in a replica or have one: prompt and largest completion.",
    ["service", "replica"],
)
SAMPLE_RETRIES = Counter("fovea_gateway_sample_retries_total", "Retried samples by reason.", ["reason"])
PUSHES = Counter("fovea_gateway_snapshot_pushes_total", "Pushes of snapshots to samplers by outcome.", ["outcome"])
PUSH_SECONDS = Histogram("fovea_gateway_snapshot_push_seconds", "Seconds of a push of a snapshot.", buckets=_SECONDS)
REPLICAS = Gauge(
    "fovea_gateway_replicas",
    "Replicas by service, base model and state (known to discovery, and up). A service that a base model does not use"
    " has no series.",
    ["service", "base_model", "state"],
)
RENDER_RETRIES = Counter("fovea_gateway_render_retries_total", "Retried renders by reason.", ["reason"])
VERSION_LAG = Gauge(
    "fovea_gateway_sampler_version_lag",
    "Versions that a sampler is behind the requested one, for the model that is furthest behind.",
    ["sampler"],
)
TRAINER_RESTARTS = Counter("fovea_gateway_trainer_restarts_total", "Times that a different trainer instance answered.")
TRAINER_MODELS = Gauge(
    "fovea_gateway_trainer_models",
    "Models in a trainer's memory. A trainer that does not answer has no series.",
    ["base_model", "trainer"],
)
JOURNAL_BYTES = Gauge(
    "fovea_gateway_journal_bytes", "Bytes of requests that are stored until their effects are durable in the trainer."
)
RESTORE_SECONDS = Histogram(
    "fovea_gateway_model_restore_seconds", "Seconds until a model is restored, beside others.", buckets=_SECONDS
)
REPLAYED = Counter(
    "fovea_gateway_replayed_commands_total",
    "Commands replayed after a restart of the trainer, by comparison with the answer that the client received: equal,"
    " different, or rounded if the trainer has other numerics.",
    ["answer"],
)
for _answer in ("equal", "different", "rounded"):
    REPLAYED.labels(_answer)  # start at 0, because increase() misses the first event of a series that starts at 1
RESULT_BYTES = Gauge(
    "fovea_gateway_result_bytes", "Bytes of results in the database, as of the last time there were many."
)
SESSIONS = Gauge("fovea_gateway_sessions", "Open sessions.")
PARKED = Gauge("fovea_gateway_parked_sessions", "Parked sessions.")
PARKED_BYTES = Gauge("fovea_gateway_parked_bytes", "Bytes of the trainer's storage that parked sessions use.")
UNNAMED_BYTES = Gauge(
    "fovea_gateway_unnamed_bytes", "Bytes of the trainer's storage that unnamed adapter snapshots use."
)
STATE_BYTES = Gauge(
    "fovea_gateway_state_volume_bytes", "Bytes of the volume of the state folder: size and free.", ["kind"]
)


TOKENS = Counter(
    "fovea_gateway_tokens_total",
    "Tokens of finished requests by tenant and kind: trained, scored (losses without gradients), prompt, cached (part"
    " of prompt) and sampled.",
    ["tenant", "kind"],
)
GPU_SECONDS = Counter(
    "fovea_gateway_gpu_seconds_total",
    "GPU seconds of trainer and samplers by tenant and kind of request: its share, by tokens, of the time of each GPU."
    " Work on the CPU does not count.",
    ["tenant", "kind"],
)
