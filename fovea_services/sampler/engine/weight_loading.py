"""Loads a full snapshot that has arrived, through vLLM's own weight-transfer lifecycle."""

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
"""vLLM's `load_format` of a checkpoint without bytes, see `fovea.random_weights`."""
_PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
"""Whose kernels read experts' weights as vLLM loads them; on CPU that is our own."""


@dataclass
class ArrivalInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where arrivals are found by their task; groups are joined by `SnapshotReceiver`."""

    find_arrival: Callable[[str], Arrival]


@dataclass
class ArrivalUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which arrival to load."""

    task_id: str


class ArrivalWeightTransferEngine(WeightTransferEngine[ArrivalInitInfo, ArrivalUpdateInfo]):  # type: ignore[misc]
    """vLLM's weight-transfer engine over snapshots that are already in this worker's memory."""

    init_info_cls = ArrivalInitInfo
    update_info_cls = ArrivalUpdateInfo

    def init_transfer_engine(self, init_info: ArrivalInitInfo) -> None:
        """Takes over where arrivals are found."""
        self._find_arrival = init_info.find_arrival

    @property
    def _in_place(self) -> bool:
        """Whether the kernels read weights as they are stored: then they are written over where they stand.

        vLLM's own way takes the model apart and builds it up again layer by layer, a second of standstill for 8 GB.
        """
        plain = self.model_config.quantization is None and not _repacked(self.model)
        return self.device.type == "cuda" and plain

    def start_weight_update(self) -> None:
        """Prepares the model for weights in checkpoint format."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ArrivalUpdateInfo) -> None:
        """Loads all tensors of the arrival. Raises KeyError for an unknown one."""
        arrival = self._find_arrival(update_info.task_id)
        with torch.no_grad():
            self.model.load_weights(arrival.tensors())
        if arrival.device.type == "cuda":
            torch.cuda.synchronize(arrival.device)

    def finish_weight_update(self) -> None:
        """Puts the loaded weights into the form that the kernels read."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            kernels_cpu.pack_embeddings(self.model)

    def shutdown(self) -> None:
        """Has nothing to release."""


class RandomModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Draws the weights of a checkpoint without bytes on the model's device."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by their names in the files."""
        device = next(model.parameters()).device
        for path in sorted(Path(model_config.model).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name, tensor in random_slices(file, device).items():
                    yield name, tensor[...]


def problem(model: torch.nn.Module) -> str:
    """Why no full weights can be loaded into a model, or the empty string."""
    for method in _repacked(model):
        if isinstance(method, FusedMoEModularMethod):  # put around the kernel for adapters: it never packs
            kept = (
                f"{type(method.old_quant_method).__name__} keeps weights of experts in another form than they come in"
            )
            return f"{kept}, and vLLM brings later ones into it only where it serves no adapters"
    return ""


def _repacked(model: torch.nn.Module) -> list[Any]:
    """vLLM's methods of experts whose kernels read weights in another form than they are loaded in."""
    methods = [module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)]
    backends = [getattr(getattr(method, "old_quant_method", method), "unquantized_backend", None) for method in methods]
    return [method for method, backend in zip(methods, backends, strict=True) if backend not in _PLAIN_EXPERTS]


def register() -> None:
    """Makes our weight-transfer engine and model loader known to vLLM in this process; twice is no error."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArrivalWeightTransferEngine)
        register_model_loader(RANDOM_FORMAT)(RandomModelLoader)
