"""Loads received snapshots in a worker: full weights into the model, and adapters into vLLM's LoRA slots.

Full weights are loaded with vLLM's weight-transfer interface. An adapter is held in the worker's memory as one flat
tensor, from which vLLM loads it whenever it needs it. An adapter that arrives on the GPU is loaded into vLLM's slots
directly. A background thread then moves the flat tensor to host memory, which has room for many adapters.
"""

import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import layout_of, padded_bytes
from fovea_sampler.engine.manifest_check import (
    Reads,
    Shape,
    SplitTable,
    checkpoint_directory,
    checkpoint_shapes,
)
from fovea_sampler.engine.snapshot_receiver import Arrival
from fovea_sampler.vllm_patches import kernels_cpu
from fovea_sampler.vllm_patches.lora_memory import request_of
from fovea_sampler.vllm_patches.lora_slots import FlatView, LoraSlots, PlannedAdapter, SlotPlan
from fovea_weights.weight_transfer import HostCopier

logger = logging.getLogger(__name__)

BACKEND = "fovea"
_PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
"""Backends with kernels that read the weights of experts in the form in which vLLM loads them.

CPU is Fovea's own kernel.
"""
_MAX_LAYOUTS = 32
_reads: dict[str, Reads] = {}
"""The elements of the checkpoint's tensors that this worker has read, if there are several workers."""


@dataclass
class ArrivalInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A function that finds a received snapshot by its task. `SnapshotReceiver` has joined the groups already."""

    find_arrival: Callable[[str], Arrival]


@dataclass
class ArrivalUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The task of the received snapshot to load."""

    task_id: str


class ArrivalWeightTransferEngine(WeightTransferEngine[ArrivalInitInfo, ArrivalUpdateInfo]):  # type: ignore[misc]
    """A weight-transfer engine of vLLM that loads snapshots which this worker has already received."""

    init_info_cls = ArrivalInitInfo
    update_info_cls = ArrivalUpdateInfo

    def init_transfer_engine(self, init_info: ArrivalInitInfo) -> None:
        """Stores the function that finds received snapshots."""
        self._find_arrival = init_info.find_arrival

    @property
    def _in_place(self) -> bool:
        """True if the kernels read weights in checkpoint form, so that new ones can be written over the old in place.

        Otherwise vLLM's layerwise reload restores each layer to its unprocessed form and processes it again, which
        pauses sampling for a second for 8 GB. Latent attention (DeepSeek-V3) also reads products made of its weights.
        """
        plain = self.model_config.quantization is None and not self.model_config.use_mla and not repacked(self.model)
        return self.device.type == "cuda" and plain

    def start_weight_update(self) -> None:
        """Prepares the model to load weights in checkpoint form."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ArrivalUpdateInfo) -> None:
        """Loads all tensors of a received snapshot. Raises KeyError for an unknown task."""
        arrival = self._find_arrival(update_info.task_id)
        with torch.no_grad():
            self.model.load_weights(arrival.tensors(self.device))
        if arrival.device.type == "cuda":
            torch.cuda.synchronize(arrival.device)

    def finish_weight_update(self) -> None:
        """Converts the loaded weights into the form that the kernels read."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            kernels_cpu.pack_embeddings(self.model)

    def shutdown(self) -> None:
        """Does nothing: the engine holds no resources."""


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the elements of a checkpoint's tensors that vLLM's loaders of weights read, for any model class.

    A model loads `tensors` while the mode is active. They have no values: the views of them that loaders take tell
    which elements are read. The mode drops all writes, so the model stays as it is.

    Args:
        shapes: The shapes of the checkpoint's tensors, keyed by their names.
        dtype: Their type.
    """

    def __init__(self, shapes: Mapping[str, Shape], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        self._names = {_storage(tensor): name for name, tensor in self.tensors.items()}
        self._boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {name: set() for name in shapes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            return func(*args, **kwargs)  # a view
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        for tensor in found:
            self._note(tensor)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        if any(tensor.is_meta for tensor in found):
            if func is torch.ops.aten._local_scalar_dense.default:
                return torch.zeros((), dtype=args[0].dtype).item()
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)

    def reads(self) -> dict[str, Reads]:
        """Returns the elements read of each tensor, or more of them: those of one range of indices or of several."""
        return {name: _reads_of(boxes, tuple(self.tensors[name].shape)) for name, boxes in self._boxes.items()}

    def _note(self, tensor: torch.Tensor) -> None:
        name = self._names.get(_storage(tensor)) if tensor.is_meta else None
        if name is not None and tensor.numel():
            self._boxes[name].add(_box_of(tensor, tuple(self.tensors[name].shape)))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _box_of(view: torch.Tensor, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Returns the start and end of a view along each dimension of its contiguous tensor; of all of it if unclear."""
    sizes = {stride: size for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1 and stride}
    rest, box = int(view.storage_offset()), []
    for place, extent in enumerate(shape):
        stride = math.prod(shape[place + 1 :])
        start, rest = divmod(rest, stride)
        end = start + sizes.pop(stride, 1)
        if end > extent:
            break
        box.append((start, end))
    return tuple(box) if len(box) == len(shape) and not sizes else tuple((0, extent) for extent in shape)


def _reads_of(boxes: Iterable[tuple[tuple[int, int], ...]], shape: Shape) -> Reads:
    """Returns the indices along one dimension that contain all boxes."""
    unions = [_union(along) for along in zip(*boxes, strict=True)]
    if not unions:
        return 0, ()
    divided = [place for place, union in enumerate(unions) if union != (0, shape[place])]
    return (divided[0], unions[divided[0]]) if len(divided) == 1 else (0, (0, shape[0]))


def _union(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the bounds of the union of ranges: start and end of each in turn."""
    bounds: list[int] = []
    for start, end in sorted(set(ranges)):
        if bounds and start <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += [start, end]
    return tuple(bounds)


def rename_of(model: torch.nn.Module) -> Callable[[str], str]:
    """Returns the function that maps the checkpoint's names of tensors to vLLM's."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renamer = mapper.get_rename_mapper()
    return lambda name: renamer.map_name(name) or name


def problem(model: torch.nn.Module) -> str:
    """Returns the reason why no full weights can be loaded into a model, or an empty string."""
    for method in repacked(model):
        if isinstance(method, FusedMoEModularMethod):  # vLLM's wrapper for adapters: it never repacks weights
            kept = f"{type(method.old_quant_method).__name__} stores weights of experts in a form of its own"
            return f"{kept}, and vLLM converts pushed weights to it only if the sampler serves no adapters"
    return ""


def repacked(model: torch.nn.Module) -> list[Any]:
    """Returns the model's expert methods with kernels that read weights in another form than the checkpoint's."""
    methods = [module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)]
    backends = [getattr(getattr(method, "old_quant_method", method), "unquantized_backend", None) for method in methods]
    return [method for method, backend in zip(methods, backends, strict=True) if backend not in _PLAIN_EXPERTS]


def register() -> None:
    """Registers Fovea's weight-transfer engine with vLLM, and traces what loaders read. It may be called twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArrivalWeightTransferEngine)
        DefaultModelLoader.load_weights = _traced(DefaultModelLoader.load_weights)


def split_table(rename: Callable[[str], str]) -> SplitTable:
    """Returns the division of full weights over all workers. All of them must call it."""
    workers = get_world_group()
    reads: list[Mapping[str, Reads]] = [{}] * workers.world_size
    if workers.world_size > 1:
        own = {rename(name): found for name, found in _reads.items()}
        torch.distributed.all_gather_object(reads, own, group=workers.cpu_group)
    return SplitTable(reads, rename)


def _traced(load: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Returns a replacement of `load_weights` that finds out first what it will read, if there are several workers."""

    def load_weights(loader: Any, model: Any, config: Any) -> None:
        if get_world_group().world_size > 1 and config.quantization is None:
            trace = LoadTrace(checkpoint_shapes(checkpoint_directory(config.model)), config.dtype)
            try:
                with torch.no_grad(), trace:
                    model.load_weights(iter(trace.tensors.items()))
                _reads.update(trace.reads())
            except Exception as error:  # a loader of some model class that needs the values
                logger.warning("every worker receives all of pushed full weights: %s: %s", type(error).__name__, error)
        load(loader, model, config)

    return load_weights


@dataclass(frozen=True)
class _Layout:
    """The plan that all adapters of one layout share, and the slices of their flat tensors that are B factors."""

    plan: SlotPlan
    scaled: list[FlatView]


@dataclass(frozen=True)
class _Kept:
    lora_id: int
    adapter: PlannedAdapter


class AdapterBank:
    """The tensors of the adapters that one worker holds, by their vLLM name. A name is never reused.

    The service (`weight_store`) decides which adapters are held and calls `keep` and `forget`.

    Args:
        worker_manager: vLLM's LRUCacheWorkerLoRAManager. It decides itself which adapters are in its slots.
    """

    def __init__(self, worker_manager: Any) -> None:
        self._manager = worker_manager
        self._slots = LoraSlots(worker_manager, self._find)
        self._layouts: LRUCache[bytes, _Layout] = LRUCache(_MAX_LAYOUTS)
        self._planning = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._copier: HostCopier | None = None

    def build(self, arrival: Arrival) -> PlannedAdapter:
        """Converts a received adapter into the form that vLLM loads, and consumes its bytes.

        It may run on another thread while the engine computes. Raises ValueError or TypeError if vLLM cannot use the
        adapter.
        """
        manifest = arrival.manifest
        dtype: torch.dtype = self._manager.lora_config.lora_dtype
        runs = [run.to(dtype) for run in arrival.take_runs()]
        flat = runs[0] if len(runs) == 1 else torch.cat(runs)
        layout = self._layout(manifest, flat.numel())
        scale = manifest.lora.alpha / manifest.lora.rank
        if scale != 1:
            torch._foreach_mul_([view.of(flat) for view in layout.scaled], scale)
        return PlannedAdapter(flat, manifest.lora.rank, layout.plan)

    def keep(self, name: str, lora_id: int, adapter: PlannedAdapter) -> None:
        """Stores an adapter and lets vLLM load it once, so that an unusable one fails here.

        Does nothing if the name is already stored.
        """
        if name in self._kept:
            return
        self._kept[name] = _Kept(lora_id, adapter)
        try:
            self._manager.add_adapter(request_of(name, lora_id))
        except Exception:
            self.forget(name)
            raise
        if adapter.flat.is_cuda:
            self._copier = self._copier or HostCopier(adapter.flat.device)
            threading.Thread(target=_to_host, args=(adapter, self._copier), name=f"to-host-{name}", daemon=True).start()

    def forget(self, name: str) -> None:
        """Frees an adapter that no request uses any more. Unknown names are ignored."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._manager.remove_adapter(kept.lora_id)

    def _find(self, name: str) -> PlannedAdapter:
        kept = self._kept.get(name)
        if kept is None:
            raise ValueError(f"adapter {name} is not held")
        return kept.adapter

    def _layout(self, manifest: weights_pb2.SnapshotManifest, length: int) -> _Layout:
        key = layout_of(manifest)
        with self._planning:
            layout = self._layouts.get(key)
            if layout is None:
                plan = self._slots.plan(lambda flat: self._views(manifest, flat), length, manifest.lora.rank)
                layout = _Layout(plan, [view for name, view in _cut(manifest) if ".lora_B." in name])
                self._layouts[key] = layout
            return layout

    def _views(self, manifest: weights_pb2.SnapshotManifest, flat: torch.Tensor) -> LoRAModel:
        model = self._manager._adapter_manager.model
        rank = manifest.lora.rank
        peft = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
        peft.validate_legal(self._manager.lora_config)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        tensors = {name: view.of(flat) for name, view in _cut(manifest)}
        return LoRAModel.from_lora_tensors(
            lora_model_id=1,
            tensors=tensors | _of_values(tensors, model.config.get_text_config()),
            peft_helper=peft,
            device=str(flat.device),
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )


def _of_values(tensors: Mapping[str, torch.Tensor], text: Any) -> dict[str, torch.Tensor]:
    """Returns copies of the k_proj factors under the name v_proj, for layers that use their keys as values.

    Such layers (full attention in Gemma 4 31B) have one weight for both. vLLM multiplies by it twice, as k_proj and as
    v_proj, and would apply the adapter only to the first.
    """
    if not getattr(text, "attention_k_eq_v", False):
        return {}
    found = {}
    for name, tensor in tensors.items():
        layer = re.search(r"\.layers\.(\d+)\.self_attn\.k_proj\.", name)
        if layer is not None and text.layer_types[int(layer[1])] == "full_attention":
            found[name.replace(".k_proj.", ".v_proj.")] = tensor
    return found


def _cut(manifest: weights_pb2.SnapshotManifest) -> Iterator[tuple[str, FlatView]]:
    """Yields the name and the slice of each tensor in an adapter's flat tensor, padded as on the wire."""
    start = 0
    for spec in manifest.tensors:
        strides = [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
        yield spec.name, FlatView(tuple(spec.shape), tuple(strides), start)
        start += padded_bytes(spec) // getattr(torch, spec.dtype).itemsize


def _to_host(adapter: PlannedAdapter, copy: HostCopier) -> None:
    adapter.move(copy(adapter.flat))
