"""Frozen weights in host memory, by name, with an identity that any receiver can check.

Adapters are held by rank 0 alone; of full parameters every rank holds its shards.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import DigestBuilder
from services.trainer.sharding import dtype_name


@dataclass(frozen=True)
class HeldSnapshot:
    """One snapshot.

    Args:
        identity: As on the wire.
        tensors: On the host, in the order of transfer: whole for an adapter, this rank's shards for full parameters.
        specs: Name, type and whole shape of each, in that order.
        lora: Shape of the adapter; None for full parameters.
        local_bytes: What it takes on this rank.
    """

    identity: weights_pb2.Snapshot
    tensors: dict[str, Tensor]
    specs: list[weights_pb2.TensorSpec]
    lora: weights_pb2.LoraConfig | None
    local_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_bytes", sum(t.numel() * t.element_size() for t in self.tensors.values()))


class SnapshotMemory:
    """Snapshots by id, the least recently used dropped above `max_bytes`, but never the newest of a model.

    Safe to use from several threads. Ranks that make the same calls drop the same snapshots.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldSnapshot] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, snapshot: HeldSnapshot) -> None:
        """Holds a snapshot as the newest of its model."""
        with self._lock:
            self._held[snapshot.identity.snapshot_id] = snapshot
            self._newest[snapshot.identity.model_id] = snapshot.identity.snapshot_id
            total = sum(_global_bytes(held) for held in self._held.values())
            kept = set(self._newest.values())
            for name in [name for name in self._held if name not in kept]:
                if total <= self._max_bytes:
                    break
                total -= _global_bytes(self._held.pop(name))

    def get(self, snapshot_id: str) -> HeldSnapshot | None:
        """The snapshot if it is held; counts as a use."""
        with self._lock:
            if snapshot_id in self._held:
                self._held.move_to_end(snapshot_id)
            return self._held.get(snapshot_id)

    def drop(self, snapshot_id: str) -> None:
        """Forgets a snapshot; unknown ones are no error."""
        with self._lock:
            dropped = self._held.pop(snapshot_id, None)
            if dropped and self._newest.get(dropped.identity.model_id) == snapshot_id:
                del self._newest[dropped.identity.model_id]

    def release_model(self, model_id: str) -> None:
        """The model is gone: its newest snapshot may be dropped like any other."""
        with self._lock:
            self._newest.pop(model_id, None)


def _global_bytes(snapshot: HeldSnapshot) -> int:
    return int(snapshot.identity.size_bytes)


def spec_of(name: str, dtype: torch.dtype, shape: Iterable[int]) -> weights_pb2.TensorSpec:
    """Name, type and shape on the wire."""
    return weights_pb2.TensorSpec(name=name, dtype=dtype_name(dtype), shape=list(shape))


def tensor_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The contiguous bytes of a host tensor, without a copy where it is contiguous already."""
    flat: npt.NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, int]:
    """SHA-256 over names, types, shapes and bytes, and the size of all tensors."""
    builder = DigestBuilder()
    size_bytes = 0
    for name, tensor in tensors:
        data = tensor_bytes(tensor.cpu())
        builder.add(name, dtype_name(tensor.dtype), tuple(tensor.shape), data.data)
        size_bytes += data.nbytes
    return builder.hexdigest(), size_bytes
