"""Prometheus metrics of the trainer: on rank 0; of its own share, on the first rank of every other node."""

from prometheus_client import Counter, Gauge, Histogram

COMMANDS = Counter("fovea_trainer_commands_total", "Commands by outcome.", ["command", "outcome"])
COMMAND_SECONDS = Histogram(
    "fovea_trainer_command_seconds",
    "Seconds that a command ran on all ranks.",
    ["command"],
    buckets=(0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
QUEUED = Gauge("fovea_trainer_queued_commands", "Commands that wait for their turn.")
QUEUE_SECONDS = Histogram(
    "fovea_trainer_queue_seconds",
    "Seconds that a command waited for its turn.",
    buckets=(0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
RANKS = Gauge("fovea_trainer_ranks", "Ranks that run; the trainer ends, and its models with it, when one dies.")
LOGPROB_GAP = Gauge(
    "fovea_trainer_logprob_gap_nats",
    "Mean absolute difference between the sampler's log-probabilities and the trainer's, over the tokens with an "
    "advantage of the last call, by model.",
    ["model"],
)
FEATURES = Counter(
    "fovea_trainer_features_total", "Images that the first rank of a node needed the tensors of.", ["result"]
)
TOKENS = Counter("fovea_trainer_tokens_total", "Tokens computed.", ["backward"])
DATUMS = Counter("fovea_trainer_datums_total", "Datums computed.", ["backward"])
PACKING = Gauge("fovea_trainer_packing_efficiency", "Share of micro-batch capacity that the last call used.")
MODELS = Gauge("fovea_trainer_models", "Models that exist.")
PUSHES = Counter("fovea_trainer_pushes_total", "Snapshots pushed, by sampler and outcome.", ["outcome"])
PUSHED_BYTES = Counter("fovea_trainer_pushed_bytes_total", "Bytes of snapshots that samplers loaded.")
PUSH_SECONDS = Histogram(
    "fovea_trainer_push_seconds", "Seconds of a push to all samplers.", buckets=(0.02, 0.1, 0.3, 1, 3, 10, 30, 100)
)
DURABLE_LAG_COMMANDS = Gauge(
    "fovea_trainer_durable_lag_commands",
    "Commands that changed weights and are in no durable point, of the worst model.",
)
DURABLE_LAG_SECONDS = Gauge(
    "fovea_trainer_durable_lag_seconds", "Seconds since the first change of weights that is in no durable point."
)
DURABLE_WAITING_BYTES = Gauge(
    "fovea_trainer_durable_waiting_bytes",
    "Bytes of unnamed snapshots that memory keeps until they are written; at --snapshot-memory-mib new ones wait.",
)
DURABLE_BYTES = Counter("fovea_trainer_durable_bytes_total", "Bytes of durable points and snapshots written.", ["kind"])
DURABLE_SECONDS = Histogram(
    "fovea_trainer_durable_seconds",
    "Seconds from the copy of a state until it was durable.",
    buckets=(0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
DURABLE_FAILURES = Counter(
    "fovea_trainer_durable_failures_total", "Durable points, snapshots and removals that failed."
)
GPU_PEAK = Gauge("fovea_trainer_gpu_peak_bytes", "The most GPU memory that a node's first rank has used at once.")


def forget_model(model_id: str) -> None:
    """Removes the series of a model that is gone."""
    LOGPROB_GAP.remove(model_id)
