"""Frozen weights in memory, keyed by snapshot id, with a digest that any receiver can check.

Only rank 0 holds adapters. Every rank holds its shards of full parameters. Snapshots stay on the device while it has
free memory, otherwise on the host.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import Part, buckets, padded_bytes, tensor_bytes
from fovea_trainer.model.sharding import dtype_name
from fovea_weights.weight_transfer import device_digest

_DIGEST_BYTES = 256 * 2**20
PACKED = "packed"
"""Name of the single tensor of a stored adapter, uint8 [n]: the buckets of a push, one after the other."""


@dataclass(frozen=True)
class StoredSnapshot:
    """One snapshot.

    Args:
        identity: The snapshot's identity message.
        tensors: For an adapter the one tensor `PACKED`; for full parameters this rank's shards in transfer order.
            Stored on this rank's device, or on the host if the device has no room.
        specs: Name, dtype and unsharded shape of each tensor, in transfer order.
        lora: Settings of the adapter; None for full parameters.
        local_bytes: Bytes that the snapshot occupies on this rank.
    """

    identity: weights_pb2.Snapshot
    tensors: dict[str, Tensor]
    specs: list[weights_pb2.TensorSpec]
    lora: weights_pb2.LoraConfig | None
    local_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_bytes", sum(t.numel() * t.element_size() for t in self.tensors.values()))


class SnapshotStore:
    """Snapshots by id. Thread-safe.

    Above `max_bytes` the least recently used are dropped, except pinned snapshots and the newest one of each model.
    Ranks that make the same calls drop the same snapshots.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, StoredSnapshot] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._pins: Counter[str] = Counter()
        self._lock = threading.Lock()

    def make_room(self, identity: weights_pb2.Snapshot, size_bytes: int) -> None:
        """Drops the snapshots that `put` would drop for a new snapshot of this size.

        Call it before you make the new snapshot, because old and new ones may not fit into memory together.
        """
        with self._lock:
            kept = {name for model, name in self._newest.items() if model != identity.model_id}
            self._shrink(self.max_bytes - size_bytes, {*kept, identity.snapshot_id})

    def put(self, snapshot: StoredSnapshot) -> None:
        """Stores a snapshot as the newest of its model."""
        with self._lock:
            self._held[snapshot.identity.snapshot_id] = snapshot
            self._newest[snapshot.identity.model_id] = snapshot.identity.snapshot_id
            self._shrink(self.max_bytes, set(self._newest.values()))

    def _shrink(self, max_bytes: int, kept: set[str]) -> None:
        total = sum(_global_bytes(held) for held in self._held.values())
        for name in [name for name in self._held if name not in kept and not self._pins[name]]:
            if total <= max_bytes:
                break
            total -= _global_bytes(self._held.pop(name))

    def get(self, snapshot_id: str) -> StoredSnapshot | None:
        """Returns the snapshot, or None if it is not held. Counts as a use."""
        with self._lock:
            if snapshot_id in self._held:
                self._held.move_to_end(snapshot_id)
            return self._held.get(snapshot_id)

    def drop_older(self) -> int:
        """Drops all but the newest snapshot of each model. Returns the bytes that they occupied on this rank."""
        with self._lock:
            before = self._local_bytes()
            self._shrink(0, set(self._newest.values()))
            return before - self._local_bytes()

    def spill(self) -> int:
        """Moves device tensors to the host. Returns their bytes.

        A push in progress is not interrupted.
        """
        with self._lock:
            away = [held for held in self._held.values() if any(t.device.type != "cpu" for t in held.tensors.values())]
        for held in away:
            moved = replace(held, tensors={name: _on_host(tensor) for name, tensor in held.tensors.items()})
            with self._lock:
                if self._held.get(held.identity.snapshot_id) is held:
                    self._held[held.identity.snapshot_id] = moved
        return sum(held.local_bytes for held in away)

    def _local_bytes(self) -> int:
        return sum(held.local_bytes for held in self._held.values())

    def pin(self, snapshot_id: str) -> None:
        """Protects a snapshot from being dropped to save memory, until `unpin` is called as often as `pin`."""
        with self._lock:
            self._pins[snapshot_id] += 1

    def unpin(self, snapshot_id: str) -> None:
        """Undoes one `pin`. The snapshot may be dropped at once if nothing else protects it."""
        with self._lock:
            self._pins[snapshot_id] -= 1
            self._pins += Counter()  # removes the entries at zero
            self._shrink(self.max_bytes, set(self._newest.values()))

    def drop(self, snapshot_id: str) -> None:
        """Drops a snapshot. Does nothing if it is unknown."""
        with self._lock:
            dropped = self._held.pop(snapshot_id, None)
            if dropped and self._newest.get(dropped.identity.model_id) == snapshot_id:
                del self._newest[dropped.identity.model_id]

    def release_model(self, model_id: str) -> None:
        """Stops protecting the newest snapshot of a model that was freed."""
        with self._lock:
            self._newest.pop(model_id, None)


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory, from which a push is as fast as the bus."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _global_bytes(snapshot: StoredSnapshot) -> int:
    return int(snapshot.identity.size_bytes)


def specs_of(tensors: Mapping[str, Tensor]) -> list[weights_pb2.TensorSpec]:
    """Returns the name, dtype and shape of each tensor, in order. A sharded tensor has its unsharded shape."""
    return [
        weights_pb2.TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def size_of(specs: Iterable[weights_pb2.TensorSpec]) -> int:
    """Returns the total size of all tensors in bytes."""
    return sum(tensor_bytes(spec) for spec in specs)


def packed(specs: Sequence[weights_pb2.TensorSpec], tensors: Iterable[Tensor]) -> Tensor:
    """Returns the payload of one broadcast: all tensors, each padded as the manifest requires.

    Args:
        specs: Specs of the tensors.
        tensors: The tensors, in the same order, on one device.

    Returns:
        uint8 [n] on the device of the tensors.
    """
    parts: list[Tensor] = []
    for spec, tensor in zip(specs, tensors, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(flat)
        if missing := padded_bytes(spec) - flat.numel():
            parts.append(flat.new_zeros(missing))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def packed_parts(parts: list[list[Part]], tensors: list[Tensor]) -> list[Tensor]:
    """Returns the payload of one broadcast to each worker, given its part of each of the tensors."""
    return [
        packed([part.spec for part in own], (_cut(part, one) for part, one in zip(own, tensors, strict=True)))
        for own in parts
    ]


def _cut(part: Part, tensor: Tensor) -> Tensor:
    if part.is_whole:
        return tensor
    pieces = [tensor.narrow(part.dimension, start, end - start) for start, end in part.ranges]
    return torch.cat(pieces, part.dimension) if pieces else tensor.narrow(part.dimension, 0, 0)


def unpacked(specs: Iterable[weights_pb2.TensorSpec], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields name and view of each tensor in `data`, uint8 [n]. The inverse of `packed`."""
    offset = 0
    for spec in specs:
        part = data.narrow(0, offset, tensor_bytes(spec))
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(*spec.shape)
        offset += padded_bytes(spec)


def packed_buckets(
    specs: Iterable[weights_pb2.TensorSpec], tensors: Iterable[Tensor], bucket_bytes: int
) -> Iterator[tuple[list[weights_pb2.TensorSpec], Tensor]]:
    """Yields the specs and the payload of each broadcast. Reads only the tensors of one bucket at a time."""
    rest = iter(tensors)
    for bucket in buckets(specs, bucket_bytes):
        yield bucket, packed(bucket, islice(rest, len(bucket)))


def digest_of(specs: Sequence[weights_pb2.TensorSpec], tensors: Iterable[Tensor]) -> str:
    """Returns the digest of tensors, computed on their device."""
    digest = device_digest()
    for bucket, data in packed_buckets(specs, tensors, _DIGEST_BYTES):
        digest.add(bucket, data.view(torch.int64))
    return digest.hexdigest()
