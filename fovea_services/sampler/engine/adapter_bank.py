"""Holds adapters in a worker's memory, each as one flat tensor from which vLLM loads it whenever it needs it.

An adapter that arrives on the GPU is loaded into vLLM's slots directly. A background thread then moves the flat tensor
to host memory, which has room for many adapters.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import layout_of, padded_bytes
from fovea_services.sampler.engine.host_offload import HostCopier
from fovea_services.sampler.engine.snapshot_receiver import Arrival
from fovea_services.sampler.vllm_patches.lora_slots import LoraSlots, Piece, PlannedAdapter, SlotPlan, request_of

_MAX_LAYOUTS = 32


@dataclass(frozen=True)
class _Layout:
    """The plan that all adapters of one layout share, and the slices of their flat tensors that are B factors."""

    plan: SlotPlan
    scaled: list[Piece]


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
            torch._foreach_mul_([piece.of(flat) for piece in layout.scaled], scale)
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
                plan = self._slots.plan(lambda flat: self._views(manifest, flat), length)
                layout = _Layout(plan, [piece for name, piece in _cut(manifest) if ".lora_B." in name])
                self._layouts[key] = layout
            return layout

    def _views(self, manifest: weights_pb2.SnapshotManifest, flat: torch.Tensor) -> LoRAModel:
        model = self._manager._adapter_manager.model
        rank = manifest.lora.rank
        peft = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
        peft.validate_legal(self._manager.lora_config)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        tensors = {name: piece.of(flat) for name, piece in _cut(manifest)}
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


def _cut(manifest: weights_pb2.SnapshotManifest) -> Iterator[tuple[str, Piece]]:
    """Yields the name and the slice of each tensor in an adapter's flat tensor, padded as on the wire."""
    start = 0
    for spec in manifest.tensors:
        strides = [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
        yield spec.name, Piece(tuple(spec.shape), tuple(strides), start)
        start += padded_bytes(spec) // getattr(torch, spec.dtype).itemsize


def _to_host(adapter: PlannedAdapter, copy: HostCopier) -> None:
    adapter.move(copy(adapter.flat))
