"""Adapters from memory: the worker keeps the bytes of each and builds vLLM's form of it whenever vLLM wants it.

What comes in on the GPU goes into vLLM's slots without a detour over the host; both forms of it follow to host memory
behind the engine's back, where there is room for many.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from services.sampler.engine.host_copies import HostCopier
from services.sampler.engine.punica import RANKS
from services.sampler.engine.receiving import Arrival

PATH_SCHEME = "memory://"


@dataclass
class _Kept:
    lora_id: int
    arrival: Arrival


class AdapterBank:
    """The adapters that one worker holds, by vLLM name. Names are never used twice."""

    def __init__(self, worker_manager: Any) -> None:
        self._manager = worker_manager
        self._kept: dict[str, _Kept] = {}
        self._copier: HostCopier | None = None
        # vLLM drops adapters from its own cache whenever it likes; it gets them again from here.
        worker_manager._load_adapter = self._load

    def keep(self, name: str, lora_id: int, arrival: Arrival) -> None:
        """Takes an adapter and has vLLM load it once, so that a bad one fails here. Raises ValueError for a bad one."""
        self._kept[name] = _Kept(lora_id, arrival)
        RANKS[lora_id] = arrival.manifest.lora.rank
        try:
            self._manager.add_adapter(LoRARequest(name, lora_id, PATH_SCHEME + name))
        except Exception:
            self.forget(name)
            raise
        if arrival.device.type == "cuda":
            torch.cuda.synchronize(arrival.device)
            built = self._manager._adapter_manager.get_adapter(lora_id)
            self._copier = self._copier or HostCopier(arrival.device)
            copying = (arrival, built, self._copier)
            threading.Thread(target=_to_host, args=copying, name=f"to-host-{name}", daemon=True).start()

    def forget(self, name: str) -> None:
        """Frees an adapter that no request uses any more. Unknown names are no error."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._manager.remove_adapter(kept.lora_id)
            RANKS.pop(kept.lora_id, None)

    def _load(self, request: LoRARequest) -> LoRAModel:
        kept = self._kept.get(request.lora_path.removeprefix(PATH_SCHEME))
        if kept is None:
            raise ValueError(f"adapter {request.lora_name} is not held")
        manager = self._manager
        model = manager._adapter_manager.model
        config = kept.arrival.manifest.lora
        dtype = manager.lora_config.lora_dtype
        peft = PEFTHelper.from_dict({"r": config.rank, "lora_alpha": config.alpha, "target_modules": []})
        peft.validate_legal(manager.lora_config)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            lora_model_id=request.lora_int_id,
            # vLLM multiplies B by the scale in place: give it copies, or the next build would be scaled twice.
            tensors={name: tensor.to(dtype, copy=True) for name, tensor in kept.arrival.tensors()},
            peft_helper=peft,
            device=str(kept.arrival.device),
            dtype=dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )


def _to_host(arrival: Arrival, built: LoRAModel, copy: HostCopier) -> None:
    for layer in built.loras.values():
        layer.lora_a, layer.lora_b = _host_copy(layer.lora_a, copy), _host_copy(layer.lora_b, copy)
    arrival.to_host(copy)


def _host_copy(weights: Any, copy: HostCopier) -> Any:
    """Of one tensor, or of the parts of a packed layer, some of which may be missing."""
    if isinstance(weights, list):
        return [_host_copy(part, copy) for part in weights]
    return weights if weights is None else copy(weights)
