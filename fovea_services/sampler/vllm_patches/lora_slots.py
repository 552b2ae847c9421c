"""Adapters from memory into vLLM's LoRA slots, many tensors per call.

Replaces: `vllm.lora.worker_manager.WorkerLoRAManager._load_adapter`, and of `vllm.lora.model_manager.LoRAModelManager`
    `_add_adapter` and `modules`.
Why: vLLM reads adapters from folders, and puts them into a slot module by module and tensor by tensor, 40 ms for an
    adapter of 504 tensors. To it, all LoRA layers are one here. What it would copy where is asked of its own code once
    per layout, with tensors that hold nothing, so that no knowledge of its layers is needed.
Upstream: vllm-project/vllm issues 4068 (adapters from tensors), closed as stale, and 20149, open; the time: none
    filed.
Delete when: a LoRARequest carries tensors, and a slot is filled by a few copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from fovea_services.sampler.vllm_patches.punica import RunwisePunicaWrapper

_WHOLE_MODEL = "whole-model"
"""Name of the one layer that vLLM sees."""


def request_of(name: str, lora_id: int) -> LoRARequest:
    """vLLM's reference to an adapter in memory; the path names nothing."""
    return LoRARequest(name, lora_id, f"memory://{name}")


@dataclass(frozen=True)
class Piece:
    """A view of an adapter's flat tensor; all in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, self.start)


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """Where the adapters of one layout go.

    Attributes:
        pieces: What is copied.
        targets: Where, for each slot.
        dense_count: How many of them, the first, are whole rows.
        switches: For each slot, integers [] that are 1 while it holds such an adapter: of experts that it adapts.
    """

    pieces: list[Piece]
    targets: list[list[torch.Tensor]]
    dense_count: int
    switches: list[list[torch.Tensor]]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of an adapter."""
        return [piece.of(flat) for piece in self.pieces]


@dataclass
class PlannedAdapter:
    """An adapter in vLLM's element type, B scaled.

    Args:
        flat: All its tensors, one after another; on the GPU or on the host.
        rank: Of A and B.
        plan: Of its layout.
    """

    flat: torch.Tensor
    rank: int
    plan: SlotPlan

    def __post_init__(self) -> None:
        self.parts = self.plan.parts(self.flat)

    def move(self, flat: torch.Tensor) -> None:
        """Lets go of where it was. May run while it is copied into a slot."""
        self.flat, self.parts = flat, self.plan.parts(flat)


@dataclass(frozen=True)
class _WholeLayer:
    """What vLLM's manager reads of a layer's weights, and hands to `LoraSlots.set_lora`."""

    lora_a: PlannedAdapter
    lora_b: None = None


class LoraSlots:
    """All LoRA layers of a model; to vLLM they are one, with the methods that it calls of a layer.

    Args:
        worker_manager: vLLM's LRUCacheWorkerLoRAManager. From now on it sees this layer alone. It drops adapters from
            its own cache whenever it likes, and gets them again by `find`.
        find: The adapter of a name. Raises ValueError if none is held.

    Raises TypeError if vLLM's layers do not work as this expects.
    """

    def __init__(self, worker_manager: Any, find: Callable[[str], PlannedAdapter]) -> None:
        self._find = find
        self._manager = manager = worker_manager._adapter_manager
        self._cpu_wrappers = [
            wrapper for wrapper in manager.punica_wrapper_mapping.values() if isinstance(wrapper, RunwisePunicaWrapper)
        ]
        self._modules: dict[str, BaseLayerWithLoRA] = dict(manager.modules)
        self._slot_count: int = manager.lora_slots
        if manager.is_pooling_model:
            raise TypeError("adapters are served for language models only")
        self._zeroed = [self._reset_targets(slot) for slot in range(self._slot_count)]
        # What a slot holds; nothing is known of what vLLM tried out while it started.
        self._held: list[SlotPlan | None] = [None] * self._slot_count
        manager.modules = {_WHOLE_MODEL: self}
        manager._add_adapter = self._add_adapter
        worker_manager._load_adapter = self._load_adapter

    @torch.inference_mode()
    def plan(self, build: Callable[[torch.Tensor], LoRAModel], length: int) -> SlotPlan:
        """Finds out what vLLM would copy where. Copies nothing, and may run beside the engine.

        Args:
            build: vLLM's form of an adapter from its flat tensor, all of it views.
            length: Elements of the flat tensor.

        Raises TypeError if vLLM would copy anything but parts of that tensor, or leave some of it out.
        """
        flat = torch.empty(length, device="meta")
        model = build(flat)
        tensor_count = 2 * len(model.loras)
        self._manager._create_merged_loras_inplace(model)
        for name, module in self._modules.items():  # which the manager no longer sees
            if isinstance(module, FusedMoEWithLoRA):
                self._manager._slice_moe_lora_ep(model, module, name)
        written = [self._write(slot, model) for slot in range(self._slot_count)]
        switches = [[target for target, number in some.filled if number == 1] for some in written]
        recorded = [[(target, part) for target, part in some.copied if part.is_meta] for some in written]
        if any(part.untyped_storage()._cdata != flat.untyped_storage()._cdata for _, part in recorded[0]):
            raise TypeError("vLLM changes adapters on their way into its slots: lora_slots.py was written for 0.32.0")
        if len(recorded[0]) < tensor_count:
            raise TypeError(f"vLLM takes {len(recorded[0])} of the adapter's {tensor_count} tensors")
        for copies in recorded:
            copies.sort(key=lambda copy: not copy[0].is_contiguous())
        pieces = [Piece(tuple(part.size()), part.stride(), int(part.storage_offset())) for _, part in recorded[0]]
        dense_count = sum(target.is_contiguous() for target, _ in recorded[0])
        return SlotPlan(pieces, [[target for target, _ in copies] for copies in recorded], dense_count, switches)

    @torch.inference_mode()
    def set_lora(self, index: int, adapter: PlannedAdapter, _: None = None) -> None:
        """Puts an adapter into a slot. Called by vLLM."""
        plan, parts = adapter.plan, adapter.parts
        if self._held[index] is not plan:  # another of the same layout is overwritten to its last element
            self.reset_lora(index)
            if plan.switches[index]:
                torch._foreach_add_(plan.switches[index], 1)
        if parts[0].is_cuda:
            parts[0].record_stream(torch.cuda.current_stream())
        # Apart, for torch's GPU kernels take many tensors at once only if all of them are dense.
        for some in (slice(0, plan.dense_count), slice(plan.dense_count, None)):
            if parts[some]:
                torch._foreach_copy_(plan.targets[index][some], parts[some], non_blocking=True)
        self._held[index] = plan
        for wrapper in self._cpu_wrappers:
            wrapper.set_rank(index, adapter.rank)

    @torch.inference_mode()
    def reset_lora(self, index: int) -> None:
        """Empties a slot. Called by vLLM."""
        self._held[index] = None
        for some in self._zeroed[index]:
            torch._foreach_zero_(some)

    def _load_adapter(self, request: LoRARequest) -> LoRAModel:
        """Takes the place of WorkerLoRAManager._load_adapter."""
        adapter = self._find(request.lora_name)
        return LoRAModel(request.lora_int_id, adapter.rank, {_WHOLE_MODEL: _WholeLayer(adapter)})

    def _add_adapter(self, model: LoRAModel) -> None:
        """Takes the place of LoRAModelManager._add_adapter, which packs and scales: that is done."""
        self._manager._registered_adapters[model.id] = model

    @torch.inference_mode()
    def _reset_targets(self, slot: int) -> list[list[torch.Tensor]]:
        """What is emptied of a slot, by element type: torch's GPU kernels take many tensors only if they share it."""
        recorder = _Recorder()
        with recorder:
            for module in self._modules.values():
                module.reset_lora(slot)
        if not recorder.filled or any(number != 0 for _, number in recorder.filled):
            raise TypeError("vLLM empties its slots in another way than that of 0.32.0")
        targets: dict[torch.dtype, list[torch.Tensor]] = {}
        for target, _ in recorder.filled:
            targets.setdefault(target.dtype, []).append(target)
        return list(targets.values())

    def _write(self, slot: int, model: LoRAModel) -> "_Recorder":
        """What vLLM would write to put an adapter on the meta device into a slot."""
        recorder = _Recorder()
        with recorder:
            for name, layer in model.loras.items():
                self._modules[name].set_lora(slot, layer.lora_a, layer.lora_b)
        return recorder


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would be filled with a number, and what would be copied, instead of doing it.

    A worker of several joins its rows of q, k and v before it copies them: such a source is noted part by part.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filled: list[tuple[torch.Tensor, float]] = []
        self.copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._joined: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.fill_.Tensor, aten.fill_.Scalar, aten.zero_.default):
            self.filled.append((args[0], float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        if func is aten.copy_.default and args[1].dim() == 0 and not args[1].is_meta:  # how torch fills a scalar
            self.filled.append((args[0], float(args[1])))
            return args[0]
        if func is aten.copy_.default:
            self.copied += self._copies(*args[:2])
            return args[0]
        made = func(*args, **(kwargs or {}))
        if func is aten.cat.default and args[1:] in ((), (0,)):
            self._joined.append((made, args[0]))
        return made

    def _copies(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = next((parts for made, parts in self._joined if made is source), None)
        if parts is None:
            return [(target, source)]
        return list(zip(torch.split(target, [len(part) for part in parts]), parts, strict=True))
