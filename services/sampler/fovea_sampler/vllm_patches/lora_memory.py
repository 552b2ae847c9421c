"""Gives adapters of all ranks one memory on the device, and lets those that leave the vision tower alone share images.

Replaces: `vllm.lora.model_manager.LoRAModelManager.lora_slots`, `_create_lora_modules` and, until a LoraSlots exists,
    `activate_adapter`; `vllm.lora.layers.VocabParallelEmbeddingWithLoRA.can_replace_layer`; and
    `vllm.v1.engine.input_processor.InputProcessor._get_mm_identifier`.
Why: vLLM gives each adapter of a step a slot of the largest rank, and each slot memory for an adapter of the embedding,
    which Fovea never trains. With the patch, `max_loras` only limits the adapters of a step, and `configure` sets the
    memory. `lora_slots` divides it, and `lora_kernels` and `punica` read it.
    vLLM encodes an image again for every adapter if adapters may change the tower. With the patch it does so only for
    those that do.
Upstream: vllm-project/vllm pull request 22782 documents the cost of a high `max_lora_rank`; none filed about images.
Delete when: vLLM allocates slots by rank, or in pages; and compares the tower's adapters before it encodes again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.config import get_current_vllm_config
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.v1.engine.input_processor import InputProcessor

from fovea_sampler.engine_api import slot_widths

_SLOTS_KEY = "fovea_lora_slots"
"""The entry of vLLM's `additional_config` with the number of slots of the largest rank for which there is memory."""


def configure(config: Any, slot_count: int) -> None:
    """Sets the number of slots of the largest rank for which the workers allocate memory.

    vLLM's own `max_loras` remains the most adapters of a step, which share that memory.
    """
    config.additional_config[_SLOTS_KEY] = slot_count


def apply() -> None:
    """Makes vLLM allocate memory for the configured slots, and none for embeddings. It may be called twice."""
    manager: Any = LoRAModelManager
    if manager._create_lora_modules is _create_lora_modules:
        return
    global _vllm_create
    _vllm_create = manager._create_lora_modules
    manager.lora_slots = property(lambda own: getattr(own, "fovea_slots", own.lora_config.max_loras))
    manager._create_lora_modules = _create_lora_modules
    manager.activate_adapter = _activate_trial
    input_processor: Any = InputProcessor
    input_processor._get_mm_identifier = _image_key
    VocabParallelEmbeddingWithLoRA.can_replace_layer = classmethod(lambda *_, **__: False)


_vllm_create: Callable[[Any], None]


def _create_lora_modules(manager: Any) -> None:
    """Replaces LoRAModelManager._create_lora_modules, which gives each module memory for `lora_slots` slots."""
    config = get_current_vllm_config()
    manager.fovea_slots = config.additional_config.get(_SLOTS_KEY, manager.lora_config.max_loras)
    try:
        _vllm_create(manager)
    finally:
        del manager.fovea_slots


def _activate_trial(manager: Any, lora_id: int) -> bool:
    """Replaces LoRAModelManager.activate_adapter until a LoraSlots exists: gives an adapter of zeros a slot.

    vLLM runs trial steps with as many of them as a step may have. All slots are zero at that time.
    """
    if lora_id in manager._active_adapters:
        return False
    manager.lora_index_to_id[manager.lora_index_to_id.index(None)] = lora_id
    manager._active_adapters[lora_id] = None
    return True


_TOWER_PATH = "memory://tower/"


def request_of(name: str, lora_id: int, in_tower: bool = False) -> LoRARequest:
    """Returns vLLM's reference to an adapter in memory. vLLM requires a path; this one does not exist.

    Args:
        name: The name of the adapter.
        lora_id: Its number.
        in_tower: True if it changes the vision tower, so that images must be encoded anew with it.
    """
    return LoRARequest(name, lora_id, f"{_TOWER_PATH if in_tower else 'memory://'}{name}")


def _image_key(_: Any, mm_hash: str, request: LoRARequest | None) -> str:
    """Replaces InputProcessor._get_mm_identifier: adapters that leave the tower alone share its outputs."""
    if request is None or not request.lora_path.startswith(_TOWER_PATH):
        return mm_hash
    return f"{request.lora_name}:{mm_hash}"


class RankPlace(NamedTuple):
    """The ranks of the adapters' memory that one adapter has.

    The memory of a factor A, [S, 1, R, I], is a matrix of S * R ranks. The adapter has its rows from `first` on. The
    memory of a factor B, [S, 1, O, R], has the adapter's [O, width] from element `first * O` on.
    """

    first: int
    width: int


class RankPlaces:
    """The free and used ranks of the memory of all adapters, in slots of the largest rank.

    Adapters of a smaller rank share a slot. Each gets a power of two of ranks, or a whole slot, at a multiple of that
    number. Adapters that have room together therefore fit in, if the largest are placed first.

    Args:
        slot_count: The number of slots.
        slot_ranks: The ranks of a slot, a multiple of 8.
        whole: True if each adapter needs a whole slot.
    """

    def __init__(self, slot_count: int, slot_ranks: int, whole: bool) -> None:
        self._widths = [slot_ranks] if whole else slot_widths(slot_ranks)
        self._used = bytearray(slot_count * slot_ranks // 8)

    def width_of(self, rank: int) -> int:
        """Returns the ranks that an adapter takes."""
        return next(width for width in self._widths if width >= rank)

    def take(self, rank: int) -> RankPlace | None:
        """Returns a place for an adapter, and marks it as used; None if there is no room."""
        width = self.width_of(rank)
        cells = width // 8
        for cell in range(0, len(self._used), cells):
            if not any(self._used[cell : cell + cells]):
                self._used[cell : cell + cells] = b"\x01" * cells
                return RankPlace(8 * cell, width)
        return None

    def free(self, place: RankPlace) -> None:
        """Makes a place free."""
        self._used[place.first // 8 : (place.first + place.width) // 8] = bytes(place.width // 8)
