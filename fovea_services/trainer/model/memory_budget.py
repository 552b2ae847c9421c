"""Memory of a rank's device: what is free, how large a micro-batch may be, and who is refused where it does not fit.

It is counted before it is taken. Large micro-batches keep a GPU busy, larger ones do not fit. Decisions are the same on
all ranks: what counts is the rank that has least.
"""

import ctypes
import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from fovea.runtime.machine_memory import host_free_bytes
from fovea.wire.errors import ResourceExhausted
from fovea_services.trainer.model import linear_attention
from fovea_services.trainer.ranks.control_group import ControlGroup
from fovea_services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

MOST_TOKENS = 16384
"""More does not make a step faster, measured with a model of 4 billion parameters."""
MOST_PATCHES = 65536
_LEAST_TOKENS = 1024
_LEAST_PATCHES = 4096
_TOWER_SHARE = 0.2
"""Of the memory for activations, where the vision tower is trained."""
_WORKING_BYTES = 16 * 2**30
"""Less is too little to compute fast in: copies that wait for a push then leave the device."""
_HOST_RESERVE_BYTES = 128 * 2**20
UNLIMITED = 2**62
"""Bytes, where nothing is known of a limit."""

_FLOAT32_NORMS = ("gemma3_text", "gemma4_text")
"""Language models with norms around both halves of a layer and on queries and keys, which keep copies in float32."""

_ROUTING_SIZE = 32
"""Numbers of 16 bits: where a token's copies are, once they are sorted by expert."""

_PAGE_BYTES = 4096


class DeviceMemory:
    """The memory of one rank's device.

    Args:
        device: Where the rank computes.
        limit_bytes: The most that this rank may take: of a GPU, of torch's; of a CPU, of the whole process. 0 for what
            the GPU has; on a CPU for no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self._limit_bytes = limit_bytes

    @property
    def is_known(self) -> bool:
        """Whether there is anything to count against."""
        return self.device.type != "cpu" or self._limit_bytes > 0

    def free_bytes(self) -> int:
        """What nobody has taken; of a GPU, what torch has taken here but does not use counts too."""
        if self.device.type == "cpu":
            return self._limit_bytes - _resident_bytes() if self._limit_bytes else UNLIMITED
        used_bytes = torch.cuda.memory_allocated(self.device)
        unused_bytes = torch.cuda.memory_reserved(self.device) - used_bytes
        free_bytes = int(torch.cuda.mem_get_info(self.device)[0] + unused_bytes)
        return min(free_bytes, self._limit_bytes - used_bytes) if self._limit_bytes else free_bytes

    def collect(self) -> None:
        """Gives back what is no longer used: dropped tensors, and pieces that torch keeps but cannot join."""
        gc.collect()
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
        else:
            torch.cuda.empty_cache()


def mib(size_bytes: int) -> str:
    """For messages: `1,024 MiB`."""
    return f"{max(size_bytes, 0) / 2**20:,.0f} MiB"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


@dataclass(frozen=True)
class Budgets:
    """The most tokens and patches of one micro-batch of one rank."""

    tokens: int
    patches: int


CPU_BUDGETS = Budgets(8192, MOST_PATCHES)
"""Larger ones make nothing faster there."""


def budgets_within(size_bytes: int, config: PretrainedConfig, dtype: torch.dtype, trains_vision: bool) -> Budgets:
    """The most tokens and patches whose activations fit into so much memory, but never less than is of use."""
    patches = MOST_PATCHES
    if trains_vision:
        tower_bytes = int(_TOWER_SHARE * size_bytes)
        patches = min(MOST_PATCHES, max(_LEAST_PATCHES, tower_bytes // patch_bytes(config, dtype)))
        size_bytes -= tower_bytes
    tokens = size_bytes // activation_bytes(config, dtype)
    return Budgets(max(_LEAST_TOKENS, min(MOST_TOKENS, tokens // 1024 * 1024)), patches)


def least_bytes(config: PretrainedConfig, dtype: torch.dtype, logit_chunk_bytes: int, trains_vision: bool) -> int:
    """What the smallest micro-batches take: activations, logits with their gradient and float32 form, the tower's."""
    logit_bytes = min(logit_chunk_bytes, _LEAST_TOKENS * config.get_text_config().vocab_size * dtype.itemsize)
    tower_bytes = _LEAST_PATCHES * patch_bytes(config, dtype) if trains_vision else 0
    return int(_LEAST_TOKENS * activation_bytes(config, dtype) + 4 * logit_bytes + tower_bytes)


def activation_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a layer keeps of one token for its backward pass, over all layers; a quarter more than was measured."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    delta_nets = kinds.count("linear_attention")
    kept_bytes = delta_nets * linear_attention.kept_bytes(text, dtype) if delta_nets else 0
    return (
        _copies_bytes(text, dtype)
        + kept_bytes
        + sum(_kept_bytes(text, index, kind, dtype) for index, kind in enumerate(kinds))
    )


def _kept_bytes(text: PretrainedConfig, index: int, kind: str, dtype: torch.dtype) -> int:
    """What one layer keeps of one token, besides what a gated delta net does."""
    layer = text.per_layer_config[index]  # in Gemma 4 sizes of heads differ
    head_size = getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_attention_heads + layer.num_key_value_heads
    first_wide = text.num_hidden_layers - getattr(text, "num_kv_shared_layers", 0)
    is_wide = getattr(text, "use_double_wide_mlp", False) and index >= first_wide
    mlp_size = 0 if _has_experts(text, index) else text.intermediate_size * (2 if is_wide else 1)
    inner_size = (mlp_size or _routed_size(text)) + 2 * getattr(text, "hidden_size_per_layer_input", 0)
    attention_size = 0 if kind == "linear_attention" else head_size * heads
    norm_size = 4 * text.hidden_size + attention_size if text.model_type in _FLOAT32_NORMS else 0
    kept_size = 8 * text.hidden_size + 3 * inner_size + 4 * attention_size
    return int(dtype.itemsize * kept_size + torch.float32.itemsize * norm_size)


def _has_experts(text: PretrainedConfig, index: int) -> bool:
    is_dense = index in (getattr(text, "mlp_only_layers", None) or ())
    every = getattr(text, "decoder_sparse_step", None) or 1
    return bool(getattr(text, "num_experts", 0)) and not is_dense and (index + 1) % every == 0


def _routed_size(text: PretrainedConfig) -> int:
    """As wide an MLP as keeps what a token's experts, the one that all share, and the router do."""
    experts_size = text.num_experts_per_tok * text.moe_intermediate_size
    shared_size = getattr(text, "shared_expert_intermediate_size", None) or 0
    # A third more of the experts for the weighted product, which a dense MLP has not; float32 probabilities.
    return int(4 * experts_size + 3 * shared_size + 2 * text.num_experts) // 3 + _ROUTING_SIZE


def _copies_bytes(text: PretrainedConfig, dtype: torch.dtype) -> int:
    """What the copies of a token for its experts take while they are computed, in and out and their gradients."""
    copies = text.num_experts_per_tok if getattr(text, "num_experts", 0) else 0
    return int(4 * copies * text.hidden_size * dtype.itemsize)


def recomputed_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What one token takes where activations are computed again: the input of each layer, and all of one layer."""
    text = config.get_text_config()
    inputs_bytes = text.num_hidden_layers * text.hidden_size * dtype.itemsize
    copies_bytes = _copies_bytes(text, dtype)
    layers_bytes = activation_bytes(config, dtype) - copies_bytes
    return int(inputs_bytes + copies_bytes + 2 * layers_bytes // text.num_hidden_layers)


def patch_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What the vision tower keeps of one patch, likewise; counted, not measured."""
    vision = config.vision_config.to_dict()
    # Qwen's towers call their sizes otherwise; where Qwen2-VL has a hidden_size, it is the language model's.
    hidden_size = vision.get("embed_dim") or vision["hidden_size"]
    inner_size = vision.get("intermediate_size") or vision["mlp_ratio"] * hidden_size
    depth = vision.get("depth") or vision["num_hidden_layers"]
    return int(depth * (16 * hidden_size + 3 * inner_size) * dtype.itemsize)


class MemoryBudget:
    """Admits models and sizes micro-batches by what is free on the ranks' devices. Methods are collective.

    Args:
        memory: Of this rank's device.
        spill: Moves tensors that can wait elsewhere off this rank's device; returns whether there were any.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        config: PretrainedConfig,
        dtype: torch.dtype,
        memory: DeviceMemory,
        control: ControlGroup,
        spill: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._config = config
        self._dtype = dtype
        self._memory = memory
        self._control = control
        self._spill = spill
        self._has_vision = hasattr(config, "vision_config")
        self._logged: Budgets | None = None

    def budgets(self, pending_bytes: int, trains_vision: bool) -> Budgets:
        """Of the micro-batches of one call, by what is free now and `pending_bytes` that the call takes besides."""
        settings = self._settings
        fitting = CPU_BUDGETS
        if self._memory.is_known:
            room_bytes = self._free(pending_bytes + _WORKING_BYTES) - pending_bytes
            fitting = budgets_within(room_bytes, self._config, self._dtype, trains_vision and self._has_vision)
        found = Budgets(
            self._control.minimum(settings.token_budget or fitting.tokens),
            self._control.minimum(settings.patch_budget or fitting.patches),
        )
        if found != self._logged:
            self._logged = found
            logger.info("micro-batches of up to %d tokens, %d patches", found.tokens, found.patches)
        return found

    def recompute_above(self, budgets: Budgets) -> float:
        """Tokens above which a micro-batch keeps no activations."""
        return {"auto": budgets.tokens, "always": 0, "never": math.inf}[self._settings.recompute]

    def admit(self, size_bytes: int, trains_vision: bool, what: str) -> None:
        """Raises ResourceExhausted, on all ranks, if `what` does not fit beside a reserve for computing."""
        logit_bytes = self._settings.logit_chunk_mib * 2**20
        reserve_bytes = least_bytes(self._config, self._dtype, logit_bytes, trains_vision and self._has_vision)
        room_bytes = self._control.minimum(self._free(size_bytes + reserve_bytes) - reserve_bytes)
        if size_bytes > room_bytes:
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} on each of the trainer's devices, {mib(room_bytes)} are free beside "
                f"{mib(reserve_bytes)} kept for computing: delete a model, or take a lower rank"
            )

    def check_fits(self, token_count: int, budgets: Budgets) -> None:
        """Raises ResourceExhausted for a micro-batch above the budget that may not fit this rank. Not collective."""
        if token_count <= budgets.tokens or not self._memory.is_known:
            return
        size_bytes = token_count * recomputed_bytes(self._config, self._dtype)
        if size_bytes > (free_bytes := self._memory.free_bytes()):
            raise ResourceExhausted(
                f"a datum of {token_count} tokens needs {mib(size_bytes)} of memory, {mib(free_bytes)} are free: send "
                "shorter datums, or delete models"
            )

    def device_for(self, size_bytes: int) -> torch.device:
        """Where a copy of that size waits for its use: on this rank's device while work has room. Not collective."""
        has_room = not self._memory.is_known or self._memory.free_bytes() > 2 * size_bytes + _WORKING_BYTES
        return self._memory.device if has_room else torch.device("cpu")

    def has_room(self, device: torch.device, size_bytes: int) -> bool:
        """Whether a copy of that size fits on a device that `device_for` gave. Not collective."""
        return size_bytes + _HOST_RESERVE_BYTES <= self._free_at(device)

    def check_copy(self, device: torch.device, size_bytes: int, what: str) -> None:
        """Raises ResourceExhausted if it does not. Not collective."""
        if not self.has_room(device, size_bytes):
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} of the trainer's memory beside {mib(_HOST_RESERVE_BYTES)} kept free, "
                f"{mib(self._free_at(device))} are free: delete a model, or take a lower rank"
            )

    def _free_at(self, device: torch.device) -> int:
        away = device.type == "cpu" and self._memory.device.type != "cpu"
        return host_free_bytes() if away else self._memory.free_bytes()

    def collect(self) -> None:
        """As `DeviceMemory.collect`. Not collective."""
        self._memory.collect()

    def _free(self, wanted_bytes: int) -> int:
        if self._memory.is_known and self._memory.free_bytes() < wanted_bytes and self._spill():
            self._memory.collect()
        return self._memory.free_bytes()
