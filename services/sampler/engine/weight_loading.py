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

BACKEND = "fovea"


@dataclass
class ArrivalInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: groups are joined by `SnapshotReceiver`."""


@dataclass
class ArrivalUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which arrival to load."""

    task_id: str


class ArrivalWeightTransferEngine(WeightTransferEngine[ArrivalInitInfo, ArrivalUpdateInfo]):  # type: ignore[misc]
    """vLLM's weight-transfer engine over snapshots that are already in this worker's memory."""

    init_info_cls = ArrivalInitInfo
    update_info_cls = ArrivalUpdateInfo
    find_arrival: Callable[[str], Arrival]

    def init_transfer_engine(self, init_info: ArrivalInitInfo) -> None:
        """Has nothing to do."""

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
        arrival = self.find_arrival(update_info.task_id)
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
            self._repack_tied_heads()

    def shutdown(self) -> None:
        """Has nothing to release."""

    def _repack_tied_heads(self) -> None:
        # vLLM 0.32.0 leaves a tied lm_head with the packed oneDNN weight that it had before (1.3 nat off, measured).
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def register() -> None:
    """Makes `WeightTransferConfig(backend="fovea")` known to vLLM in this process; twice is no error."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArrivalWeightTransferEngine)
