"""How many of the largest adapters fit: into one batch, where each has a slot on the device, and into host memory."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.sampler.engine.manifest_check import Shape
from services.sampler.settings import SamplerSettings

# Of the device's memory for slots, which the KV cache goes without; of the host's for held adapters.
_SLOT_SHARE = 1 / 16
_HOST_SHARE = 1 / 4
_LEAST_SLOTS = 4
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class AdapterCapacity:
    """What an engine is given for adapters.

    Args:
        adapter_bytes: One of the largest rank on every layer, in the model's element type; 0 if that is not known.
        batched: The most in one batch.
        held_bytes: The most memory of all that are held.
    """

    adapter_bytes: int
    batched: int
    held_bytes: int

    def __str__(self) -> str:
        said = f"adapters: {self.batched} in one batch, {self.held_bytes / 2**20:,.0f} MiB of them held"
        if not self.adapter_bytes:
            return said
        size = f"{self.adapter_bytes / 2**20:,.1f} MiB each"
        return f"{said}: {self.held_bytes // self.adapter_bytes} of the largest rank, {size}"


def capacity_for(
    settings: SamplerSettings, shapes: Mapping[str, Shape], item_bytes: int, device_bytes: int, host_bytes: int
) -> AdapterCapacity:
    """What the settings say, and where they say nothing, what memory allows.

    Args:
        shapes: Of the checkpoint's tensors; none if they are not at hand.
        item_bytes: Of an element of an adapter.
        device_bytes: Memory of the device that the engine may take; a sixteenth of it may become slots.
        host_bytes: Memory of the machine; a quarter of it may hold adapters.
    """
    adapter_bytes = item_bytes * settings.max_lora_rank * _linear_widths(shapes)
    batched, held_mib = settings.max_loras, settings.max_adapter_mib
    if batched is None:
        affordable = int(device_bytes * _SLOT_SHARE / adapter_bytes) if adapter_bytes else _LEAST_SLOTS
        batched = min(max(affordable, _LEAST_SLOTS), settings.max_adapters, settings.max_sequences)
    held_bytes = int(host_bytes * _HOST_SHARE)
    if held_mib is not None:
        held_bytes = held_mib << 20
    elif adapter_bytes:
        held_bytes = min(held_bytes, settings.max_adapters * adapter_bytes)
    return AdapterCapacity(adapter_bytes, batched, held_bytes)


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container if it has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(whole, int(limit)) if limit.isdigit() else whole


def _linear_widths(shapes: Mapping[str, Shape]) -> int:
    """Inputs plus outputs of all linear layers, the unembedding included, whether tied or not."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    embeddings = {name for name in matrices if "embed" in name.split(".")[-2]}
    widths = sum(math.fsum(shape) for name, shape in matrices.items() if name not in embeddings)
    if "lm_head.weight" not in matrices:
        widths += next((math.fsum(matrices[name]) for name in embeddings if name.endswith("embed_tokens.weight")), 0)
    return int(widths)
