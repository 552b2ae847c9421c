"""Settings of the trainer: command line over `FOVEA_TRAINER_*` over default."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from fovea.runtime.hosts import is_loopback
from fovea.runtime.settings import ServiceSettings


class TrainerSettings(ServiceSettings):
    """Fovea's trainer: LoRA adapters side by side, or one full-parameter model, on one base, over gRPC."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_TRAINER_")

    model: str = Field(description="Directory or hub name of the base model.")
    renderer: str = Field("", description="host:port of a renderer, for images that name no source of their tensors.")
    ranks: int = Field(2, ge=1, le=64, description="Processes of each node, one per device.")
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Ranks of a node over which the experts of a mixture are spread: a divisor of --ranks and of their "
        "number. With 1 every rank computes all of them.",
    )
    nodes: int = Field(1, ge=1, description="Machines, or pods, that train together; each runs this command.")
    node_rank: int = Field(0, ge=0, description="Which of the nodes this is; node 0 serves, all compute.")
    master_addr: str = Field(
        "", validate_default=True, description="Address at which the nodes reach node 0, which listens on it alone."
    )
    master_port: int = Field(29500, ge=1, le=65535, description="Port at which the nodes meet on node 0.")
    rendezvous_timeout_s: float = Field(600.0, gt=0, description="Seconds that nodes wait for each other at the start.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute; auto takes GPUs if there are any."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of the base weights; auto is float32 on CPU, bfloat16 on GPU."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32", description="Type of logits, of which probabilities are made; the sampler's must be the same."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each rank.")
    max_lora_rank: int = Field(64, ge=1, description="The largest rank of an adapter.")
    max_models: int = Field(256, ge=1, description="The most models at once.")
    max_context_length: int = Field(0, ge=0, description="The most tokens of a datum; 0 takes the model's own limit.")
    max_datums: int = Field(4096, ge=1, description="The most datums of one call.")
    memory_limit_mib: int = Field(
        0,
        ge=0,
        description="The most memory of each rank, on a GPU of its device, else of its process: a model that does not "
        "fit is refused. 0 takes what the GPU has, and no limit without one.",
    )
    token_budget: int = Field(
        0, ge=0, description="The most tokens of one micro-batch of one rank; 0 takes what the GPU's memory allows."
    )
    patch_budget: int = Field(
        0, ge=0, description="The most vision patches of one micro-batch of one rank; 0 takes what memory allows."
    )
    recompute: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether backward passes compute activations again instead of keeping them, a third more work; "
        "auto does so for datums above the token budget.",
    )
    logit_chunk_mib: int = Field(
        512, ge=1, description="Memory for logits: positions are computed in chunks of this size."
    )
    custom_loss_timeout_s: float = Field(
        5.0, gt=0, description="Seconds that the traced losses of one call may take in all."
    )
    custom_loss_memory_mib: int = Field(
        1024, ge=1, description="Memory of the process of each rank that evaluates traced losses, beside torch itself."
    )
    keep_gathered: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether ranks keep whole parameters between micro-batches; auto does so below 1 GiB, and on a GPU "
        "below a sixth of its memory.",
    )
    feature_cache_mib: int = Field(1024, ge=0, description="Vision tensors that each rank keeps.")
    vision_memory_mib: int = Field(
        512, ge=0, description="Outputs of the frozen vision tower that each rank keeps on its device; 0 keeps none."
    )
    checkpoints: list[str] = Field(
        ["fovea-state/checkpoints"],
        min_length=1,
        description="Folders or fsspec URLs below which alone states and snapshots are written and read: the gateway's "
        "--checkpoint-dir. Repeat it for several.",
    )
    recovery: str = Field(
        "fovea-state/recovery",
        description="Folder or fsspec URL where the newest weights, moments and unnamed snapshots of each model are "
        "kept for a trainer that is started again; all nodes must reach it. Empty keeps nothing.",
    )
    recovery_lag_s: float = Field(
        0.0,
        ge=0,
        description="The least seconds between two durable points of one model; 0 writes as often as storage takes it.",
    )
    fetch_timeout_s: float = Field(60.0, gt=0, description="Deadline for fetching vision tensors from one renderer.")
    snapshot_memory_mib: int = Field(
        4096,
        ge=0,
        description="Snapshots held in memory; the newest of a model stays. Unnamed snapshots of adapters that are not "
        "yet written to --recovery take no more than this: above it, the next save_weights_for_sampler waits.",
    )
    transfer_address: str = Field(
        "",
        description="Address of this machine at which samplers reach it, and pushes listen; empty takes --host, or the "
        "host name for 0.0.0.0.",
    )
    transfer_senders: int = Field(
        4, ge=1, description="The most ranks that send full weights at once, each to all workers of the samplers."
    )
    transfer_bucket_mib: int = Field(256, ge=1, description="Size of one broadcast of weights.")
    transfer_timeout_s: float = Field(
        120.0, gt=0, description="Deadline of a push that names none, and of each broadcast over nccl."
    )
    join_timeout_s: float = Field(20.0, gt=0, description="Deadline for samplers to meet in a transfer group.")
    collective_timeout_s: float = Field(1800.0, gt=0, description="Deadline of one collective between ranks.")
    heartbeat_s: float = Field(30.0, gt=0, description="Seconds between signs of life among idle ranks.")
    profile: Path | None = Field(
        None, description="Directory into which rank 0 writes what its device did during four commands of training."
    )
    profile_first: int = Field(
        5, ge=1, description="The first forward_backward or optim_step that --profile looks at, counted from 1."
    )

    @property
    def sender_count(self) -> int:
        """Ranks that send full weights."""
        return min(self.transfer_senders, self.ranks * self.nodes)

    def sender_of(self, rank: int) -> int | None:
        """Which of the senders a rank is, if it is one: they are spread over the nodes, rank 0 is the first."""
        sender, offset = divmod(rank, self.ranks * self.nodes // self.sender_count)
        return sender if offset == 0 and sender < self.sender_count else None

    def _reached_at(self) -> str:
        if self.nodes > 1 and not is_loopback(self.master_addr):
            return f"--master-addr {self.master_addr}"
        return super()._reached_at()

    @field_validator("expert_parallel")
    @classmethod
    def _check_expert_parallel(cls, value: int, info: ValidationInfo) -> int:
        if (ranks := info.data.get("ranks", value)) % value:
            raise ValueError(f"{value} does not divide --ranks, {ranks}")
        return value

    @field_validator("node_rank")
    @classmethod
    def _check_node_rank(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("nodes", value + 1):
            raise ValueError(f"{value} is not below --nodes, {info.data['nodes']}; nodes count from 0")
        return value

    @field_validator("master_addr")
    @classmethod
    def _check_master_addr(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("nodes", 1) > 1:
            raise ValueError(f"--nodes is {info.data['nodes']}; give the address at which they reach node 0")
        return value
