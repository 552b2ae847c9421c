"""Prometheus metrics of the trainer.

Rank 0 serves all of them. On every other node, the first rank serves the metrics of its own work.
"""

from prometheus_client import Counter, Gauge, Histogram

COMMANDS = Counter("fovea_trainer_commands_total", "Commands by outcome.", ["command", "outcome"])
COMMAND_SECONDS = Histogram(
    "fovea_trainer_command_seconds",
    "Execution time of a command on all ranks, in seconds.",
    ["command"],
    buckets=(0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
QUEUED = Gauge("fovea_trainer_queued_commands", "Commands in the queue.")
QUEUE_SECONDS = Histogram(
    "fovea_trainer_queue_seconds",
    "Time that a command waited in the queue, in seconds.",
    buckets=(0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
RANKS = Gauge("fovea_trainer_ranks", "Running ranks; the trainer ends, and its models with it, when one dies.")
LOGPROB_GAP = Gauge(
    "fovea_trainer_logprob_gap_nats",
    "Mean absolute difference between the log-probabilities of sampler and trainer over the tokens with an advantage "
    "in the last call, per model.",
    ["model"],
)
FEATURES = Counter(
    "fovea_trainer_features_total", "Images with tensors that the first rank of a node needed.", ["result"]
)
TOKENS = Counter("fovea_trainer_tokens_total", "Tokens computed.", ["backward"])
DATUMS = Counter("fovea_trainer_datums_total", "Datums computed.", ["backward"])
PACKING = Gauge("fovea_trainer_packing_efficiency", "Share of micro-batch capacity that the last call used.")
MODELS = Gauge("fovea_trainer_models", "Models that exist.")
AWAY = Gauge("fovea_trainer_models_on_host", "Idle models with weights and moments in host memory.")
PUSHES = Counter("fovea_trainer_pushes_total", "Snapshot pushes to single samplers by outcome.", ["outcome"])
PUSHED_BYTES = Counter("fovea_trainer_pushed_bytes_total", "Bytes of snapshots that samplers loaded.")
PUSH_SECONDS = Histogram(
    "fovea_trainer_push_seconds",
    "Duration of a push to all samplers, in seconds.",
    buckets=(0.02, 0.1, 0.3, 1, 3, 10, 30, 100),
)
DURABLE_LAG_COMMANDS = Gauge(
    "fovea_trainer_durable_lag_commands",
    "Commands that changed weights and are in no durable point, for the model with the most.",
)
DURABLE_LAG_SECONDS = Gauge(
    "fovea_trainer_durable_lag_seconds", "Seconds since the oldest change of weights that is in no durable point."
)
DURABLE_WAITING_BYTES = Gauge(
    "fovea_trainer_durable_waiting_bytes",
    "Bytes of unnamed snapshots that memory retains until they are written; at --snapshot-memory-mib new ones wait.",
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
GPU_PEAK = Gauge("fovea_trainer_gpu_peak_bytes", "Peak GPU memory of a node's first rank, in bytes.")


def forget_model(model_id: str) -> None:
    """Removes the series of a model that was freed."""
    LOGPROB_GAP.remove(model_id)
