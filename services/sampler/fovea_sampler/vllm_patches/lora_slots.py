"""Copies adapters from memory into vLLM's LoRA slots, with many tensors per call.

Replaces: `vllm.lora.worker_manager.WorkerLoRAManager._load_adapter`, and `_add_adapter` and `modules` of
    `vllm.lora.model_manager.LoRAModelManager`.
Why: vLLM reads adapters from folders and copies them into a slot module by module and tensor by tensor, which takes 40
    ms for an adapter of 504 tensors. With the patch, vLLM sees a single LoRA layer, which stands for all layers of the
    model and copies all tensors with a few calls. The patch learns the sources and targets of the copies from vLLM's
    own code: once per layout, it runs that code with tensors on the meta device and records what would be copied.
    Therefore it needs no knowledge of vLLM's layers.
Upstream: vllm-project/vllm issues 4068 (adapters from tensors), closed as stale, and 20149, open; none filed about the
    time.
Delete when: a LoRARequest carries tensors, and vLLM fills a slot with a few copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from fovea_sampler.vllm_patches.punica import RunwisePunicaWrapper

_WHOLE_MODEL = "whole-model"
"""The name of the one layer that vLLM sees."""


def request_of(name: str, lora_id: int) -> LoRARequest:
    """Returns vLLM's reference to an adapter in memory. vLLM requires a path; this one does not exist."""
    return LoRARequest(name, lora_id, f"memory://{name}")


@dataclass(frozen=True)
class FlatView:
    """A view of an adapter's flat tensor: its size, strides and start, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view."""
        return flat.as_strided(self.size, self.stride, self.start)


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The copies that put an adapter of one layout into a slot.

    Attributes:
        views: The sources, as views of the adapter's flat tensor.
        targets: For each slot, the target of each view.
        dense_count: The number of contiguous targets, which come first.
        switches: For each slot, the integer tensors [] that must be 1 while the slot holds such an adapter. vLLM has
            one for each layer of experts that the adapter changes.
    """

    views: list[FlatView]
    targets: list[list[torch.Tensor]]
    dense_count: int
    switches: list[list[torch.Tensor]]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of an adapter's flat tensor."""
        return [view.of(flat) for view in self.views]


@dataclass
class PlannedAdapter:
    """An adapter in vLLM's element type, with B already multiplied by alpha / rank.

    Args:
        flat: All its tensors, concatenated; on the GPU or on the host.
        rank: The rank of A and B.
        plan: The plan of its layout.
    """

    flat: torch.Tensor
    rank: int
    plan: SlotPlan

    def __post_init__(self) -> None:
        self.parts = self.plan.parts(self.flat)

    def move(self, flat: torch.Tensor) -> None:
        """Replaces the flat tensor by an equal one in other memory. It may run while a slot copies from the old one."""
        self.flat, self.parts = flat, self.plan.parts(flat)


@dataclass(frozen=True)
class _WholeLayer:
    """The weights of the one layer, in the form that vLLM's manager passes to `LoraSlots.set_lora`."""

    lora_a: PlannedAdapter
    lora_b: None = None


class LoraSlots:
    """The one LoRA layer that vLLM sees, which stands for all LoRA layers of the model.

    Args:
        worker_manager: vLLM's LRUCacheWorkerLoRAManager. From now on it sees only this layer. It may drop an adapter
            from its cache at any time, and then gets it again from `find`.
        find: Returns the adapter of a name. Raises ValueError if none is held.

    Raises TypeError if vLLM's layers behave differently than in 0.32.0.
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
            raise TypeError("adapters are supported for language models only, not for pooling models")
        self._zeroed = [self._reset_targets(slot) for slot in range(self._slot_count)]
        # The layout in each slot; None if it is unknown, as after the trial adapters that vLLM loads at its start.
        self._held: list[SlotPlan | None] = [None] * self._slot_count
        manager.modules = {_WHOLE_MODEL: self}
        manager._add_adapter = self._add_adapter
        worker_manager._load_adapter = self._load_adapter

    @torch.inference_mode()
    def plan(self, build: Callable[[torch.Tensor], LoRAModel], length: int) -> SlotPlan:
        """Records which copies vLLM would make. It copies nothing, and may run on another thread beside the engine.

        Args:
            build: Returns vLLM's form of an adapter, which consists of views of the given flat tensor.
            length: The number of elements of the flat tensor.

        Raises TypeError if vLLM would copy anything but views of that tensor, or would not copy all of its tensors.
        """
        flat = torch.empty(length, device="meta")
        model = build(flat)
        tensor_count = 2 * len(model.loras)
        self._manager._create_merged_loras_inplace(model)
        for name, module in self._modules.items():  # by hand, because the manager no longer sees these modules
            if isinstance(module, FusedMoEWithLoRA):
                self._manager._slice_moe_lora_ep(model, module, name)
        written = [self._write(slot, model) for slot in range(self._slot_count)]
        switches = [[target for target, number in some.filled if number == 1] for some in written]
        recorded = [[(target, part) for target, part in some.copied if part.is_meta] for some in written]
        if any(part.untyped_storage()._cdata != flat.untyped_storage()._cdata for _, part in recorded[0]):
            raise TypeError(
                "vLLM changes adapters before it copies them to its slots: adapt lora_slots.py to this vLLM"
            )
        if len(recorded[0]) < tensor_count:
            raise TypeError(f"vLLM copies only {len(recorded[0])} of the adapter's {tensor_count} tensors")
        for copies in recorded:
            copies.sort(key=lambda copy: not copy[0].is_contiguous())
        views = [FlatView(tuple(part.size()), part.stride(), int(part.storage_offset())) for _, part in recorded[0]]
        dense_count = sum(target.is_contiguous() for target, _ in recorded[0])
        return SlotPlan(views, [[target for target, _ in copies] for copies in recorded], dense_count, switches)

    @torch.inference_mode()
    def set_lora(self, index: int, adapter: PlannedAdapter, _: None = None) -> None:
        """Copies an adapter into a slot. vLLM calls it."""
        plan, parts = adapter.plan, adapter.parts
        if self._held[index] is not plan:  # an adapter of the same layout is overwritten completely, without a reset
            self.reset_lora(index)
            if plan.switches[index]:
                torch._foreach_add_(plan.switches[index], 1)
        if parts[0].is_cuda:
            parts[0].record_stream(torch.cuda.current_stream())
        # In two calls, because torch's GPU kernels copy many tensors at once only if all of them are dense.
        for some in (slice(0, plan.dense_count), slice(plan.dense_count, None)):
            if parts[some]:
                torch._foreach_copy_(plan.targets[index][some], parts[some], non_blocking=True)
        self._held[index] = plan
        for wrapper in self._cpu_wrappers:
            wrapper.set_rank(index, adapter.rank)

    @torch.inference_mode()
    def reset_lora(self, index: int) -> None:
        """Empties a slot. vLLM calls it."""
        self._held[index] = None
        for some in self._zeroed[index]:
            torch._foreach_zero_(some)

    def _load_adapter(self, request: LoRARequest) -> LoRAModel:
        """Replaces WorkerLoRAManager._load_adapter: returns the adapter from memory."""
        adapter = self._find(request.lora_name)
        return LoRAModel(request.lora_int_id, adapter.rank, {_WHOLE_MODEL: _WholeLayer(adapter)})

    def _add_adapter(self, model: LoRAModel) -> None:
        """Replaces LoRAModelManager._add_adapter, which packs and scales; both are done already."""
        self._manager._registered_adapters[model.id] = model

    @torch.inference_mode()
    def _reset_targets(self, slot: int) -> list[list[torch.Tensor]]:
        """Returns the tensors that vLLM zeroes to empty a slot.

        They are grouped by element type, because torch's GPU kernels zero many tensors at once only within one type.
        """
        recorder = _Recorder()
        with recorder:
            for module in self._modules.values():
                module.reset_lora(slot)
        if not recorder.filled or any(number != 0 for _, number in recorder.filled):
            raise TypeError("vLLM empties its slots differently than 0.32.0: adapt lora_slots.py to this vLLM")
        targets: dict[torch.dtype, list[torch.Tensor]] = {}
        for target, _ in recorder.filled:
            targets.setdefault(target.dtype, []).append(target)
        return list(targets.values())

    def _write(self, slot: int, model: LoRAModel) -> "_Recorder":
        """Records the writes that vLLM would make to load an adapter on the meta device into a slot."""
        recorder = _Recorder()
        with recorder:
            for name, layer in model.loras.items():
                self._modules[name].set_lora(slot, layer.lora_a, layer.lora_b)
        return recorder


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records fills and copies instead of executing them.

    With tensor parallelism, a worker concatenates its rows of q, k and v before it copies them. Such a source is no
    view of the adapter, so the copy is recorded as one copy for each concatenated tensor.
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
        if func is aten.copy_.default and args[1].dim() == 0 and not args[1].is_meta:  # torch fills scalars this way
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
