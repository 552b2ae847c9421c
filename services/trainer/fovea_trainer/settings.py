"""Settings of the trainer. The command line overrides `FOVEA_TRAINER_*` variables, which override defaults."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from fovea.runtime.hosts import check_socket_path, is_loopback
from fovea.runtime.settings import ServiceSettings
from fovea.wire.errors import InvalidInput


class TrainerSettings(ServiceSettings):
    """Fovea's trainer: trains many LoRA adapters, or one full-parameter model, on one base model, over gRPC."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_TRAINER_")

    model: str = Field(description="Directory or hub name of the base model.")
    renderer: str = Field("", description="host:port of the renderer for images that name no source of their tensors.")
    ranks: int = Field(2, ge=1, le=64, description="Processes per node, one per device.")
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Ranks of a node over which the experts of a mixture are distributed. Must divide --ranks and the "
        "number of experts. With 1 every rank computes all experts.",
    )
    nodes: int = Field(1, ge=1, description="Machines or pods that train together. Each runs this command.")
    replicas: int = Field(
        1,
        ge=1,
        description="Copies of the base, each sharded over consecutive ranks. Must divide the ranks of all nodes. With "
        "as many as nodes, only gradients cross the network, once per step; memory of full parameters grows.",
    )
    node_rank: int = Field(0, ge=0, description="Index of this node. Node 0 serves requests, all nodes compute.")
    master_addr: str = Field(
        "", validate_default=True, description="Address of node 0 for the other nodes. Node 0 listens only on it."
    )
    master_port: int = Field(29500, ge=1, le=65535, description="Port of the rendezvous on node 0.")
    rendezvous_timeout_s: float = Field(600.0, gt=0, description="Seconds that nodes wait for each other at start.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device for computing; auto uses GPUs if there are any."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the base weights; auto is float32 on CPU, bfloat16 on GPU."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32", description="Dtype of logits; model is that of the weights. The sampler must use the same."
    )
    shared_base: str = Field(
        "",
        description="Path of the Unix socket of a sampler with --shared-base on the same device. Its weights are then "
        "the base of this trainer, which ends when the sampler ends. For adapters only, on one rank; empty loads a "
        "copy.",
    )
    threads: int = Field(1, ge=1, description="CPU threads per rank.")
    max_lora_rank: int = Field(64, ge=1, description="Maximum rank of an adapter.")
    max_models: int = Field(256, ge=1, description="Maximum number of models at a time.")
    max_context_length: int = Field(0, ge=0, description="Maximum tokens of a datum; 0 uses the model's own limit.")
    max_datums: int = Field(4096, ge=1, description="Maximum datums of one call.")
    memory_limit_mib: int = Field(
        0,
        ge=0,
        description="Memory limit of each rank in MiB, of its GPU or without a GPU of its process. A model that does "
        "not fit is refused. 0 uses all of the GPU's memory, or no limit without a GPU.",
    )
    model_memory_mib: int = Field(
        0,
        ge=0,
        description="Memory for adapters on each rank's device in MiB; others, used less recently, wait on the host. 0 "
        "keeps as many as do not make micro-batches smaller.",
    )
    token_budget: int = Field(
        0, ge=0, description="Maximum tokens of one rank's micro-batch; 0 derives it from the GPU's memory."
    )
    patch_budget: int = Field(
        0, ge=0, description="Maximum vision patches of one rank's micro-batch; 0 derives it from memory."
    )
    datum_ranks: int = Field(
        0,
        ge=0,
        description="Maximum ranks that compute one datum together, if it exceeds the token budget; 0 allows all ranks "
        "of a node, and with 1 each datum has one rank. For dense models with attention in all layers.",
    )
    recompute: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Recompute activations in backward passes instead of retaining them, a third more work; auto does "
        "so for datums above the token budget, in as many layers as their memory needs.",
    )
    recorded_tokens: int = Field(
        8192,
        ge=0,
        description="Passes of micro-batches with at most this many tokens are recorded as CUDA graphs, so that small "
        "steps do not wait for the host. For dense models on one GPU. Small calls of several adapters share a pass of "
        "at most this many tokens, also on a CPU and on ranks that hold the whole model. 0 turns both off.",
    )
    logit_chunk_mib: int = Field(
        512, ge=1, description="Memory for logits in MiB. Positions are computed in chunks of this size."
    )
    custom_loss_timeout_s: float = Field(
        5.0, gt=0, description="Time limit for the traced losses of one call in total, in seconds."
    )
    custom_loss_memory_mib: int = Field(
        1024, ge=1, description="Memory limit of each rank's process for traced losses in MiB, beside torch itself."
    )
    keep_gathered: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Keep whole parameters on each rank between micro-batches; auto does so for models below 1 GiB, "
        "and on a GPU below a sixth of its memory.",
    )
    feature_cache_mib: int = Field(1024, ge=0, description="Cache of vision tensors on each rank, in MiB.")
    vision_memory_mib: int = Field(
        512,
        ge=0,
        description="Cache of the frozen vision tower's outputs on each rank's device, in MiB; 0 disables it.",
    )
    checkpoints: list[str] = Field(
        ["fovea-state/checkpoints"],
        min_length=1,
        description="Folders or fsspec URLs for states and snapshots: the gateway's --checkpoint-dir. The trainer "
        "reads and writes only below them. Repeat the option for several.",
    )
    recovery: str = Field(
        "fovea-state/recovery",
        description="Folder or fsspec URL for the newest weights, moments and unnamed snapshots of each model, from "
        "which a restarted trainer recovers. All nodes must reach it. Empty disables recovery.",
    )
    recovery_lag_s: float = Field(
        0.0,
        ge=0,
        description="Minimum seconds between two durable points of one model; 0 writes as often as storage allows.",
    )
    recovery_most_lag_s: float = Field(
        60.0,
        gt=0,
        description="Seconds in which storage must be able to write all that waits. Above it, the next optim_step of a "
        "model with durable weights waits. Storage that does not return from a write for so long counts as failing.",
    )
    fetch_timeout_s: float = Field(
        60.0, gt=0, description="Deadline for fetching vision tensors from one renderer, in seconds."
    )
    snapshot_memory_mib: int = Field(
        4096,
        ge=0,
        description="Memory for snapshots in MiB; the newest of each model always stays. Also limits the unnamed "
        "adapter snapshots that wait to be written to --recovery: above it, the next save_weights_for_sampler waits.",
    )
    transfer_address: str = Field(
        "",
        description="Address of this machine for samplers, on which pushes listen; empty uses --host, or the host name "
        "for 0.0.0.0.",
    )
    transfer_senders: int = Field(
        4, ge=1, description="Maximum ranks that send full weights at once, each to all workers of the samplers."
    )
    transfer_bucket_mib: int = Field(256, ge=1, description="Size of one broadcast of weights, in MiB.")
    transfer_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Deadline of a push that does not set one, and of each broadcast over nccl, in seconds.",
    )
    join_timeout_s: float = Field(20.0, gt=0, description="Deadline for samplers to join a transfer group, in seconds.")
    collective_timeout_s: float = Field(
        1800.0, gt=0, description="Deadline of one collective between ranks, in seconds."
    )
    heartbeat_s: float = Field(30.0, gt=0, description="Seconds between heartbeats of idle ranks.")
    profile: Path | None = Field(
        None, description="Directory for a profile of rank 0's device during four training commands; off by default."
    )
    profile_first: int = Field(
        5, ge=1, description="First forward_backward or optim_step that --profile records, counted from 1."
    )

    @property
    def sender_count(self) -> int:
        """Number of ranks that send full weights."""
        return min(self.transfer_senders, self.ranks * self.nodes)

    def sender_of(self, rank: int) -> int | None:
        """Returns a rank's index among the senders, or None. Senders are spread over the nodes; rank 0 is the first."""
        sender, offset = divmod(rank, self.ranks * self.nodes // self.sender_count)
        return sender if offset == 0 and sender < self.sender_count else None

    def check_replicas(self, world_size: int) -> None:
        """Checks that the copies of the base have equal numbers of ranks.

        Args:
            world_size: Number of ranks of all nodes.

        Raises:
            ValueError: They have not.
        """
        if world_size % self.replicas:
            fitting = ", ".join(str(count) for count in range(1, world_size + 1) if world_size % count == 0)
            raise ValueError(
                f"--replicas is {self.replicas}, which does not divide the {world_size} ranks of all nodes: use one of "
                f"{fitting}, or other --ranks"
            )

    def check_kind(self, *, is_full: bool) -> None:
        """Raises InvalidInput if this trainer may not train all parameters, but they are to be trained."""
        if is_full and self.shared_base:
            raise InvalidInput(
                "this trainer uses the sampler's base, which nothing may change: train an adapter, or start Fovea "
                "without --shared-base",
                field="full",
            )

    def _reached_at(self) -> str:
        if self.nodes > 1 and not is_loopback(self.master_addr):
            return f"--master-addr {self.master_addr}"
        return super()._reached_at()

    @field_validator("shared_base")
    @classmethod
    def _check_shared_base(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("ranks", 1) * info.data.get("nodes", 1) > 1:
            raise ValueError("only a trainer of one rank shares a base: set --ranks 1")
        if value:
            check_socket_path(value)
        return value

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
            raise ValueError(f"--nodes is {info.data['nodes']}; set the address at which they reach node 0")
        return value
