"""Memory of a rank's device: free memory, sizes of micro-batches, and refusal of models that do not fit.

Memory is estimated before it is allocated. Large micro-batches keep a GPU busy, but too large ones do not fit.
Collective decisions are the same on all ranks and follow the rank with the least memory.
"""

import ctypes
import gc
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from fovea.runtime.machine_memory import host_free_bytes
from fovea.runtime.model_files import MixtureSizes, mixture_sizes
from fovea.wire.errors import ResourceExhausted
from fovea_trainer.model import linear_attention
from fovea_trainer.model.expert_routing import copies_bytes, has_experts, routed_size
from fovea_trainer.model.fused_layers import stream_dtype
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

MAX_TOKENS = 16384
"""The largest micro-batch in tokens. Larger ones did not make a step of a model of 4 billion parameters faster."""
MAX_PATCHES = 65536
_MIN_TOKENS = 1024
_MIN_PATCHES = 4096
_TOWER_SHARE = 0.2
"""The vision tower's share of the memory for activations, if the tower is trained."""
_WORKING_BYTES = 16 * 2**30
"""Memory to reserve for computing, in bytes. With less, steps become slow; snapshots that wait for a push then leave
the device.
"""
_SHARED_PART = 1 / 12
"""The largest part of a GPU that the adapters of shared passes occupy."""
_RECORDED_SHARE = 0.25
"""The share of a GPU's memory that recorded passes may keep for good."""
_SMALLEST_SHARE = 1e-9
_HOST_RESERVE_BYTES = 128 * 2**20
UNLIMITED = 2**62
"""Bytes, where no limit is known."""

_FLOAT32_NORMS = ("gemma3_text", "gemma4_text")
"""Model types of language models that have norms around both halves of a layer and on queries and keys. Such norms
retain float32 copies.
"""


class DeviceMemory:
    """The memory of one rank's device.

    Args:
        device: Device of the rank.
        limit_bytes: Upper limit: on a GPU for torch's allocations, on a CPU for the whole process. 0 means the GPU's
            own memory, or no limit on a CPU.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self._limit_bytes = limit_bytes
        self.set_aside_bytes = 0
        """Memory that recorded passes keep, which torch counts as unused although nothing else can have it."""

    @property
    def is_known(self) -> bool:
        """True if the free memory is known: always on a GPU, and on a CPU if there is a limit."""
        return self.device.type != "cpu" or self._limit_bytes > 0

    @property
    def total_bytes(self) -> int:
        """The memory of the GPU that this rank may use, in bytes; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0
        of_device = int(torch.cuda.get_device_properties(self.device).total_memory)
        return min(of_device, self._limit_bytes) if self._limit_bytes else of_device

    def set_aside(self, pool: tuple[int, int]) -> None:
        """Reads how much unused memory a pool of CUDA graphs keeps."""
        # `memory_reserved` may grow by less: on a full GPU torch first gives the pool other memory that it holds.
        every = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        segments = [one for one in every if tuple(one["segment_pool_id"]) == tuple(pool)]
        self.set_aside_bytes = sum(one["total_size"] - one["allocated_size"] for one in segments)

    def free_bytes(self) -> int:
        """Returns the free memory in bytes.

        On a GPU this includes memory that torch has reserved but does not use, except that of recorded passes.
        """
        if self.device.type == "cpu":
            return self._limit_bytes - _resident_bytes() if self._limit_bytes else UNLIMITED
        used_bytes = torch.cuda.memory_allocated(self.device) + self.set_aside_bytes
        unused_bytes = torch.cuda.memory_reserved(self.device) - used_bytes
        free_bytes = int(torch.cuda.mem_get_info(self.device)[0] + unused_bytes)
        return min(free_bytes, self._limit_bytes - used_bytes) if self._limit_bytes else free_bytes

    def collect(self) -> None:
        """Frees dropped tensors that still occupy memory, and returns unused memory to the system or to the device."""
        gc.collect()
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
        else:
            torch.cuda.empty_cache()


def mib(size_bytes: int) -> str:
    """Formats a size for messages, for example `1,024 MiB`."""
    return f"{max(size_bytes, 0) / 2**20:,.0f} MiB"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@dataclass(frozen=True)
class Budgets:
    """The maximum number of tokens and of patches in one rank's micro-batch.

    Attributes:
        retained: Number of tokens for which all activations fit beside a reserve; 0 if unknown.
    """

    tokens: int
    patches: int
    retained: int = 0


CPU_BUDGETS = Budgets(8192, MAX_PATCHES)
"""Budgets on a CPU, where larger micro-batches are not faster."""


def budgets_within(size_bytes: int, config: PretrainedConfig, dtype: torch.dtype, trains_vision: bool) -> Budgets:
    """Returns the largest budgets for which activations fit into a given memory, but at least a useful minimum.

    Args:
        size_bytes: Memory for activations.
        config: Configuration of the model.
        dtype: Dtype of the model.
        trains_vision: True if the vision tower is trained.
    """
    patches = MAX_PATCHES
    if trains_vision:
        tower_bytes = int(_TOWER_SHARE * size_bytes)
        patches = min(MAX_PATCHES, max(_MIN_PATCHES, tower_bytes // patch_bytes(config, dtype)))
        size_bytes -= tower_bytes
    token_bytes = activation_bytes(config, dtype)
    retained = max(size_bytes - _WORKING_BYTES, 0) // token_bytes
    return Budgets(max(_MIN_TOKENS, min(MAX_TOKENS, size_bytes // token_bytes // 1024 * 1024)), patches, retained)


def pass_bytes(config: PretrainedConfig, dtype: torch.dtype, logit_chunk_bytes: int, tokens: int, patches: int) -> int:
    """Returns the bytes of a micro-batch: activations, logits with gradient and float32 copy, patches of the tower."""
    logit_bytes = min(logit_chunk_bytes, tokens * config.get_text_config().vocab_size * dtype.itemsize)
    tower_bytes = patches * patch_bytes(config, dtype) if patches else 0
    return int(tokens * activation_bytes(config, dtype) + 4 * logit_bytes + tower_bytes)


def activation_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that all layers retain per token for the backward pass, a quarter above measured values."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    delta_nets, experts = kinds.count("linear_attention"), mixture_sizes(text.to_dict())
    retained_bytes = delta_nets * linear_attention.retained_bytes(text, dtype) if delta_nets else 0
    layers_bytes = sum(_retained_bytes(text, index, kind, dtype, experts) for index, kind in enumerate(kinds))
    return copies_bytes(text, dtype) + retained_bytes + layers_bytes


def _retained_bytes(
    text: PretrainedConfig, index: int, kind: str, dtype: torch.dtype, experts: MixtureSizes | None
) -> int:
    """Returns the bytes that one layer retains per token, without those of a gated delta net."""
    layer = text.per_layer_config[index]  # in Gemma 4 layers differ in head size
    head_size = getattr(text, "qk_head_dim", None) or getattr(layer, "head_dim", None)  # latent heads are wider
    head_size = head_size or text.hidden_size // text.num_attention_heads
    first_wide = text.num_hidden_layers - getattr(text, "num_kv_shared_layers", 0)
    is_wide = getattr(text, "use_double_wide_mlp", False) and index >= first_wide
    is_routed = experts is not None and has_experts(text, index)  # Gemma 4's experts have norms of their own
    # Read it only for a dense layer: Qwen3.5's mixture has no dense size.
    dense_name = "intermediate_size_mlp" if hasattr(text, "intermediate_size_mlp") else "intermediate_size"
    inner_size = routed_size(experts) if experts and is_routed else getattr(text, dense_name) * (2 if is_wide else 1)
    inner_size += 2 * getattr(text, "hidden_size_per_layer_input", 0)
    heads = text.num_attention_heads + layer.num_key_value_heads
    attention_size = 0 if kind == "linear_attention" else head_size * heads
    norm_size = (8 if is_routed else 4) * text.hidden_size + attention_size if text.model_type in _FLOAT32_NORMS else 0
    retained_size = 6 * text.hidden_size + 3 * inner_size + 4 * attention_size
    stream_bytes = 2 * text.hidden_size * stream_dtype(text.model_type, dtype).itemsize
    return int(dtype.itemsize * retained_size + torch.float32.itemsize * norm_size + stream_bytes)


def recomputed_bytes(config: PretrainedConfig, dtype: torch.dtype, share: float = 1.0) -> int:
    """Returns the bytes per token if a share of the layers recomputes its activations.

    They are the inputs of these layers, the activations of the others, the copies for the experts, and twice the
    activations of an average layer, which is recomputed while its gradients are computed.
    """
    text = config.get_text_config()
    inputs_bytes = text.num_hidden_layers * text.hidden_size * stream_dtype(text.model_type, dtype).itemsize
    outer_bytes = copies_bytes(text, dtype)
    layers_bytes = activation_bytes(config, dtype) - outer_bytes
    working_bytes = 2 * layers_bytes // text.num_hidden_layers if share else 0
    return int(outer_bytes + (1 - share) * layers_bytes + share * inputs_bytes + working_bytes)


def patch_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that the vision tower retains per patch for the backward pass, counted and not measured."""
    vision = config.vision_config.to_dict()
    # Qwen's towers use other names. In Qwen2-VL `hidden_size` is that of the language model.
    hidden_size = vision.get("embed_dim") or vision["hidden_size"]
    inner_size = vision.get("intermediate_size") or vision["mlp_ratio"] * hidden_size
    depth = vision.get("depth") or vision["num_hidden_layers"]
    return int(depth * (16 * hidden_size + 3 * inner_size) * dtype.itemsize)


class MemoryBudget:
    """Admits models and sizes micro-batches by the free memory of the ranks.

    Methods are collective unless they say otherwise.

    Args:
        settings: Settings of the trainer.
        config: Configuration of the model.
        dtype: Dtype of the model.
        memory: Memory of this rank's device.
        control: Control group of the rank's thread.
        spill: Frees memory of this rank's device, given the missing bytes, by moving or dropping snapshots, and by
            moving idle models. Returns True if it found any.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        config: PretrainedConfig,
        dtype: torch.dtype,
        memory: DeviceMemory,
        control: ControlGroup,
        spill: Callable[[int], bool],
    ) -> None:
        self._settings = settings
        self._config = config
        self._dtype = dtype
        self._memory = memory
        self._control = control
        self._spill = spill
        self._has_vision = hasattr(config, "vision_config")
        self._activation_bytes = activation_bytes(config, dtype)
        self._logged: tuple[int, int] | None = None

    def budgets(self, pending_bytes: int, trains_vision: bool) -> Budgets:
        """Returns the budgets for the micro-batches of one call.

        Args:
            pending_bytes: Bytes that the call will allocate besides activations.
            trains_vision: True if the vision tower is trained.
        """
        settings = self._settings
        fitting = CPU_BUDGETS
        if self._memory.is_known:
            room_bytes = self._free(pending_bytes + _WORKING_BYTES) - pending_bytes
            fitting = budgets_within(room_bytes, self._config, self._dtype, trains_vision and self._has_vision)
        found = Budgets(
            self._control.minimum(settings.token_budget or fitting.tokens),
            self._control.minimum(settings.patch_budget or fitting.patches),
            self._control.minimum(fitting.retained),
        )
        if self._logged != (found.tokens, found.patches):
            self._logged = found.tokens, found.patches
            logger.info("micro-batches have up to %d tokens and %d patches", found.tokens, found.patches)
        return found

    def make_room(self, token_count: int) -> None:
        """Frees memory for the micro-batches of a call, so that they are as large as without idle models.

        Not collective.
        """
        self._free(self.wanted_bytes(token_count))

    def wanted_bytes(self, token_count: int) -> int:
        """Returns the free memory for which idle models leave the device when a call has this many tokens."""
        return min(token_count, MAX_TOKENS) * self._activation_bytes + _WORKING_BYTES

    def recomputed_share(self, token_count: int, budgets: Budgets) -> float:
        """Returns the share of layers of which a micro-batch recomputes the activations instead of retaining them.

        It is as small as memory allows: 0 up to the token budget, and above it while all activations fit.
        """
        if self._settings.recompute != "auto":
            return float(self._settings.recompute == "always")
        if token_count <= max(budgets.tokens, budgets.retained):
            return 0.0
        least, most = (recomputed_bytes(self._config, self._dtype, share) for share in (1.0, _SMALLEST_SHARE))
        fitting = budgets.retained * self._activation_bytes / token_count
        return min(1.0, max(most - fitting, 0.0) / (most - least))

    def admit(self, size_bytes: int, trains_vision: bool, what: str) -> None:
        """Checks that a new allocation fits into the free memory, less the reserve for computing.

        Args:
            size_bytes: Bytes needed on each rank.
            trains_vision: True if the vision tower is trained.
            what: The thing to allocate, for the error message.

        Raises:
            ResourceExhausted: It does not fit; raised on all ranks.
        """
        logit_bytes = self._settings.logit_chunk_mib * 2**20
        patches = _MIN_PATCHES if trains_vision and self._has_vision else 0
        reserve_bytes = pass_bytes(self._config, self._dtype, logit_bytes, _MIN_TOKENS, patches)
        room_bytes = self._control.minimum(self._free(size_bytes + reserve_bytes) - reserve_bytes)
        if size_bytes > room_bytes:
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} on each of the trainer's devices, but only {mib(room_bytes)} are free "
                f"beside {mib(reserve_bytes)} reserved for computing: delete a model, or use a lower rank"
            )

    def has_room_to_record(self, token_count: int) -> bool:
        """Returns True if a recorded pass of `token_count` tokens may keep its memory permanently. Not collective."""
        if self._memory.device.type != "cuda":
            return False
        size_bytes = token_count * activation_bytes(self._config, self._dtype)
        most_bytes = _RECORDED_SHARE * self._memory.total_bytes
        # Recorded passes share one pool, so a pass allocates only the memory that the pool does not have yet.
        needed_bytes = size_bytes - self._memory.set_aside_bytes
        return size_bytes <= most_bytes and self._memory.free_bytes() > needed_bytes + _WORKING_BYTES

    def has_room_to_share(self, size_bytes: int) -> bool:
        """Returns True if shared passes may keep buffers of this size permanently. Not collective."""
        if self._memory.device.type != "cuda":
            return self.has_room(self._memory.device, size_bytes)
        most_bytes = _SHARED_PART * self._memory.total_bytes
        return size_bytes <= most_bytes and self._memory.free_bytes() > size_bytes + _WORKING_BYTES

    def set_aside(self, pool: tuple[int, int]) -> None:
        """Counts the memory that a pool of CUDA graphs keeps. Call it after each recording. Not collective."""
        self._memory.set_aside(pool)

    def check_fits(self, token_count: int, budgets: Budgets, ranks: int = 1) -> None:
        """Checks that a micro-batch above the token budget fits. Not collective.

        Args:
            token_count: Tokens that this rank computes.
            budgets: The budgets of the call.
            ranks: Number of ranks that share the datum.

        Raises:
            ResourceExhausted: It may not fit on this rank.
        """
        if token_count <= budgets.tokens or not self._memory.is_known:
            return
        size_bytes = token_count * recomputed_bytes(self._config, self._dtype)
        if size_bytes > (free_bytes := self._memory.free_bytes()):
            each = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise ResourceExhausted(
                f"a datum of {token_count * ranks} tokens needs {mib(size_bytes)} of memory{each}, but only "
                f"{mib(free_bytes)} are free: send shorter datums, or delete models"
            )

    def device_for(self, size_bytes: int) -> torch.device:
        """Returns the device for a copy that is used later. Not collective.

        It is this rank's device if enough memory for computing remains there, else the host.
        """
        has_room = not self._memory.is_known or self._memory.free_bytes() > 2 * size_bytes + _WORKING_BYTES
        return self._memory.device if has_room else torch.device("cpu")

    def has_room(self, device: torch.device, size_bytes: int) -> bool:
        """Returns True if a copy of that size fits on a device that `device_for` returned. Not collective."""
        return size_bytes + _HOST_RESERVE_BYTES <= self._free_at(device)

    def check_copy(self, device: torch.device, size_bytes: int, what: str) -> None:
        """Checks that a copy fits on a device. Not collective.

        Raises:
            ResourceExhausted: It does not fit.
        """
        if not self.has_room(device, size_bytes):
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} of the trainer's memory beside a reserve of "
                f"{mib(_HOST_RESERVE_BYTES)}, but only {mib(self._free_at(device))} are free: delete a model, or use a "
                "lower rank"
            )

    def _free_at(self, device: torch.device) -> int:
        away = device.type == "cpu" and self._memory.device.type != "cpu"
        return host_free_bytes() if away else self._memory.free_bytes()

    def collect(self) -> None:
        """Frees memory as `DeviceMemory.collect` does. Not collective."""
        self._memory.collect()

    def _free(self, wanted_bytes: int) -> int:
        missing_bytes = wanted_bytes - self._memory.free_bytes() if self._memory.is_known else 0
        if missing_bytes > 0 and self._spill(missing_bytes):
            self._memory.collect()
        return self._memory.free_bytes()
