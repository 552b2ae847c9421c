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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from vllm.lora.request import LoRARequest

from fovea_sampler.vllm_patches.lora_memory import RankPlace, RankPlaces

_WHOLE_MODEL = "whole-model"
"""The name of the one layer that vLLM sees."""


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
        targets: Returns the target of each view, for a slot and the memory of the adapter in it.
        dense_count: The number of contiguous targets, which come first.
        switches: For each slot, the integer tensors [] that must be 1 while the slot holds such an adapter. vLLM has
            one for each layer of experts that the adapter changes.
        in_tower: True if the adapter changes layers outside of the language model.
    """

    views: list[FlatView]
    targets: Callable[[int, RankPlace], list[torch.Tensor]]
    dense_count: int
    switches: list[list[torch.Tensor]]
    in_tower: bool

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
        self._worker = worker_manager
        self._manager = manager = worker_manager._adapter_manager
        self._wrapper = manager.punica_wrapper_mapping[
            manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
        ]
        self._wrappers = {id(wrapper): wrapper for wrapper in manager.punica_wrapper_mapping.values()}.values()
        self._modules: dict[str, BaseLayerWithLoRA] = dict(manager.modules)
        self._slot_count: int = manager.lora_slots
        if manager.is_pooling_model:
            raise TypeError("adapters are supported for language models only, not for pooling models")
        # vLLM's kernels for experts find an adapter by its slot, so with experts each adapter has a whole slot.
        self._whole = any(isinstance(module, FusedMoEWithLoRA) for module in self._modules.values())
        self._memory = {} if self._whole else {one[0].data_ptr(): one for one in _memory_of(self._modules.values())}
        room = min((len(one) for one, _ in self._memory.values()), default=self._slot_count)
        self._ranks = RankPlaces(room, manager.lora_config.max_lora_rank, self._whole)
        self._places: dict[int, RankPlace] = {}
        self._zeroed = [self._reset_targets(slot) for slot in range(self._slot_count if self._whole else 1)]
        self._held: dict[RankPlace, SlotPlan] = {}  # the layout in each place, if it is known
        self._needed: set[int] = set()
        manager.modules = {_WHOLE_MODEL: self}
        manager._add_adapter = self._add_adapter
        manager.activate_adapter = self._activate
        worker_manager._load_adapter = self._load_adapter
        self._apply_adapters = worker_manager._apply_adapters
        worker_manager._apply_adapters = self._apply_step

    @torch.inference_mode()
    def plan(self, build: Callable[[torch.Tensor], LoRAModel], length: int, rank: int) -> SlotPlan:
        """Records which copies vLLM would make. It copies nothing, and may run on another thread beside the engine.

        Args:
            build: Returns vLLM's form of an adapter, which consists of views of the given flat tensor.
            length: The number of elements of the flat tensor.
            rank: The rank of the adapter.

        Raises TypeError if vLLM would copy anything but views of that tensor, or would not copy all of its tensors.
        """
        flat = torch.empty(length, device="meta")
        model = build(flat)
        tensor_count = 2 * len(model.loras)
        self._manager._create_merged_loras_inplace(model)
        in_tower = any(self._modules[name].punica_wrapper is not self._wrapper for name in model.loras)
        for name, module in self._modules.items():  # by hand, because the manager no longer sees these modules
            if isinstance(module, FusedMoEWithLoRA):
                self._manager._slice_moe_lora_ep(model, module, name)
        written = [self._write(slot, model) for slot in range(len(self._zeroed))]
        switches = [[target for target, number in some.filled if number == 1] for some in written]
        recorded = [[(target, part) for target, part in some.copied if part.is_meta] for some in written]
        if any(part.untyped_storage()._cdata != flat.untyped_storage()._cdata for _, part in recorded[0]):
            raise TypeError(
                "vLLM changes adapters before it copies them to its slots: adapt lora_slots.py to this vLLM"
            )
        if len(recorded[0]) < tensor_count:
            raise TypeError(f"vLLM copies only {len(recorded[0])} of the adapter's {tensor_count} tensors")
        if self._whole:
            whole = recorded
        else:
            spots = [_Spot.of(target, self._memory) for target, _ in recorded[0]]
            example = RankPlace(0, self._ranks.width_of(rank))
            whole = [[(spot.at(example), part) for spot, (_, part) in zip(spots, recorded[0], strict=True)]]
        order = sorted(range(len(whole[0])), key=lambda number: not whole[0][number][0].is_contiguous())
        parts = [recorded[0][number][1] for number in order]
        views = [FlatView(tuple(part.size()), part.stride(), int(part.storage_offset())) for part in parts]
        dense_count = sum(target.is_contiguous() for target, _ in whole[0])
        if self._whole:
            by_slot = [[copies[number][0] for number in order] for copies in recorded]
            return SlotPlan(views, lambda slot, _: by_slot[slot], dense_count, switches, in_tower)
        ordered = [spots[number] for number in order]
        return SlotPlan(views, lambda _, place: [spot.at(place) for spot in ordered], dense_count, [], in_tower)

    @torch.inference_mode()
    def set_lora(self, index: int, adapter: PlannedAdapter, _: None = None) -> None:
        """Copies an adapter into the memory of a slot. vLLM calls it."""
        plan, parts, place = adapter.plan, adapter.parts, self._places[index]
        if (
            self._held.get(place) is not plan
        ):  # an adapter of the same layout is overwritten completely, without a reset
            self._empty(index, place)
            if self._whole and plan.switches[index]:
                torch._foreach_add_(plan.switches[index], 1)
        if self._manager.device.type == "cuda" and not parts[0].is_cuda:
            parts = plan.parts(adapter.flat.to(self._manager.device))  # one copy over the bus instead of hundreds
        if parts[0].is_cuda:
            parts[0].record_stream(torch.cuda.current_stream())
        targets = plan.targets(index, place)
        # In two calls, because torch's GPU kernels copy many tensors at once only if all of them are dense.
        for some in (slice(0, plan.dense_count), slice(plan.dense_count, None)):
            if parts[some]:
                torch._foreach_copy_(targets[some], parts[some], non_blocking=True)
        self._held[place] = plan
        for wrapper in self._wrappers:
            wrapper.set_place(index, place, adapter.rank)

    def reset_lora(self, index: int) -> None:
        """Does nothing. vLLM calls it for an adapter without weights for a layer, which this layer never has."""

    @torch.inference_mode()
    def _empty(self, index: int, place: RankPlace) -> None:
        """Zeroes the memory of a place."""
        end = place.first + place.width
        for other in [one for one in self._held if one.first < end and place.first < one.first + one.width]:
            del self._held[other]
        if self._whole:
            zeroed = self._zeroed[index]
        else:
            zeroed = [[one.view(-1)[place.first * size : end * size] for one, size in self._sizes()]]
        for some in zeroed:
            torch._foreach_zero_(some)

    def _sizes(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the memory of each factor, and the elements of one rank in it."""
        return [(one, one[0].numel() // self._manager.lora_config.max_lora_rank) for one, _ in self._memory.values()]

    def _apply_step(self, requests: set[LoRARequest]) -> None:
        """Replaces WorkerLoRAManager._apply_adapters: adapters of the step are not evicted for one another."""
        self._needed = {request.lora_int_id for request in requests if request}
        self._apply_adapters(requests)

    def _activate(self, lora_id: int) -> bool:
        """Replaces LoRAModelManager.activate_adapter: gives an adapter a slot and memory for its rank.

        The least recently used adapters that the last step did not need make room. An adapter that the step does not
        need either, as one that was just pushed, gets no slot if there is no room.
        """
        manager = self._manager
        active = manager._active_adapters
        if lora_id in active:
            active.touch(lora_id)
            return False
        adapter = manager._registered_adapters[lora_id].loras[_WHOLE_MODEL].lora_a
        while (index := self._give(adapter.rank)) is None:
            idle = next((other for other in active.order if other not in self._needed), None)
            if idle is not None:
                active.pop(idle)
                manager._deactivate_adapter(idle)
            elif lora_id in self._needed:
                return self._pack()
            else:
                return False
        self._fill(index, lora_id, adapter)
        return True

    def _give(self, rank: int) -> int | None:
        """Returns a free slot that has got memory for the rank; None if there is no slot or no memory."""
        ids: list[int | None] = self._manager.lora_index_to_id
        for slot in [slot for slot in self._places if ids[slot] is None]:
            self._ranks.free(self._places.pop(slot))
        if None not in ids:
            return None
        slot, ranks = ids.index(None), self._manager.lora_config.max_lora_rank
        place = RankPlace(slot * ranks, ranks) if self._whole else self._ranks.take(rank)
        if place is None:
            return None
        self._places[slot] = place
        return int(slot)

    def _fill(self, index: int, lora_id: int, adapter: PlannedAdapter) -> None:
        self._manager._active_adapters[lora_id] = None
        self._manager.lora_index_to_id[index] = lora_id
        self._manager._last_mapping = None  # the place of an adapter may have changed, but not its slot
        self.set_lora(index, adapter)

    def _pack(self) -> bool:
        """Places all adapters of the step anew, the largest first, because free ranks lie between them."""
        manager = self._manager
        for lora_id in list(manager._active_adapters.order):
            manager._active_adapters.pop(lora_id)
            manager._deactivate_adapter(lora_id)
        found = {
            lora_id: manager._registered_adapters[lora_id].loras[_WHOLE_MODEL].lora_a
            for lora_id in self._needed
            if lora_id in manager._registered_adapters
        }
        for lora_id, adapter in sorted(found.items(), key=lambda item: -item[1].rank):
            index = self._give(adapter.rank)
            if index is None:
                raise RuntimeError(f"the adapters of a step need more memory than its {len(found)} slots have")
            self._fill(index, lora_id, adapter)
        return True

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


def _memory_of(modules: Iterable[BaseLayerWithLoRA]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields the memory of each factor of modules without experts, A [S, 1, R, I] or B [S, 1, O, R]; True for B."""
    for module in modules:
        for stacks in (module.lora_a_stacked, module.lora_b_stacked):
            for one in (stacks,) if isinstance(stacks, torch.Tensor) else stacks:
                yield one, stacks is module.lora_b_stacked


@dataclass(frozen=True)
class _Spot:
    """The target of a copy, in terms of the adapter's place.

    Attributes:
        memory: The memory of the factor.
        size: The size of the target.
        start: The row of A, or the output of B, at which the target begins.
        is_b: True for a factor B.
    """

    memory: torch.Tensor
    size: tuple[int, ...]
    start: int
    is_b: bool

    @classmethod
    def of(cls, target: torch.Tensor, known: Mapping[int, tuple[torch.Tensor, bool]]) -> "_Spot":
        """Returns the spot of a target in slot 0. Raises TypeError if it is not in the known memory."""
        found = known.get(target.untyped_storage().data_ptr())
        if found is None or target.storage_offset() % found[0].shape[-1]:
            raise TypeError("vLLM stores adapters differently than 0.32.0: adapt lora_slots.py to this vLLM")
        memory, is_b = found
        return cls(memory, tuple(target.size()), target.storage_offset() // memory.shape[-1], is_b)

    def at(self, place: RankPlace) -> torch.Tensor:
        """Returns the target for an adapter in a place."""
        width = place.width if self.is_b else self.memory.shape[-1]
        begin = place.first * (self.memory.shape[-2] if self.is_b else width) + self.start * width
        return self.memory.as_strided(self.size, (width, 1), begin)


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
