"""Loads a full snapshot that has arrived, through vLLM's own weight-transfer lifecycle."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from services.sampler.engine.snapshot_receiver import Arrival
from services.sampler.vllm_patches import tied_head

BACKEND = "fovea"


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
        return self.device.type == "cuda" and self.model_config.quantization is None

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
            tied_head.apply(self.model)

    def shutdown(self) -> None:
        """Has nothing to release."""


def register() -> None:
    """Makes `WeightTransferConfig(backend="fovea")` known to vLLM in this process; twice is no error."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArrivalWeightTransferEngine)
