"""Loads a received full snapshot into the model with vLLM's weight-transfer interface."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from fovea.random_weights import random_slices
from fovea_services.sampler.engine.snapshot_receiver import Arrival
from fovea_services.sampler.vllm_patches import kernels_cpu

BACKEND = "fovea"
RANDOM_FORMAT = "fovea_random"
"""The `load_format` of a checkpoint that has shapes but no values; see `fovea.random_weights`."""
_PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
"""Backends with kernels that read the weights of experts in the form in which vLLM loads them.

CPU is Fovea's own kernel.
"""


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
        pauses sampling for a second for 8 GB.
        """
        plain = self.model_config.quantization is None and not _repacked(self.model)
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
            self.model.load_weights(arrival.tensors())
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


class RandomModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Draws random weights for a checkpoint that has shapes but no values, on the model's device."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors by their names in the checkpoint's files."""
        device = next(model.parameters()).device
        for path in sorted(Path(model_config.model).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name, tensor in random_slices(file, device).items():
                    yield name, tensor[...]


def problem(model: torch.nn.Module) -> str:
    """Returns the reason why no full weights can be loaded into a model, or an empty string."""
    for method in _repacked(model):
        if isinstance(method, FusedMoEModularMethod):  # vLLM's wrapper for adapters: it never repacks weights
            kept = f"{type(method.old_quant_method).__name__} stores weights of experts in a form of its own"
            return f"{kept}, and vLLM converts pushed weights to it only if the sampler serves no adapters"
    return ""


def _repacked(model: torch.nn.Module) -> list[Any]:
    """Returns the model's expert methods with kernels that read weights in another form than the checkpoint's."""
    methods = [module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)]
    backends = [getattr(getattr(method, "old_quant_method", method), "unquantized_backend", None) for method in methods]
    return [method for method, backend in zip(methods, backends, strict=True) if backend not in _PLAIN_EXPERTS]


def register() -> None:
    """Registers Fovea's weight-transfer engine and model loader with vLLM in this process. It may be called twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArrivalWeightTransferEngine)
        register_model_loader(RANDOM_FORMAT)(RandomModelLoader)
