"""Frozen weights in memory, by name, with an identity that any receiver can check.

Adapters are held by rank 0 alone; of full parameters every rank holds its shards. They wait on the device while it has
room to spare, else on the host.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from fovea.api.v1 import weights_pb2
from fovea.device_digest import device_digest
from fovea.wire.manifest import buckets, padded_bytes, tensor_bytes
from fovea_services.trainer.model.sharding import dtype_name

_DIGEST_BYTES = 256 * 2**20
PACKED = "packed"
"""Name of the one tensor that an adapter is held as, uint8 [n]: what a push broadcasts, bucket after bucket."""


@dataclass(frozen=True)
class StoredSnapshot:
    """One snapshot.

    Args:
        identity: As on the wire.
        tensors: Of an adapter one, `PACKED`; of full parameters this rank's shards, in the order of transfer. On this
            rank's device, or on the host where that has no room.
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


class SnapshotStore:
    """Snapshots by id, the least recently used dropped above `max_bytes`, but never the newest of a model.

    Safe to use from several threads. Ranks that make the same calls drop the same snapshots.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, StoredSnapshot] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._pins: Counter[str] = Counter()
        self._lock = threading.Lock()

    def make_room(self, identity: weights_pb2.Snapshot, size_bytes: int) -> None:
        """Drops what `put` would drop for a snapshot of that size, before it is made: two sets may not fit at once."""
        with self._lock:
            kept = {name for model, name in self._newest.items() if model != identity.model_id}
            self._shrink(self.max_bytes - size_bytes, {*kept, identity.snapshot_id})

    def put(self, snapshot: StoredSnapshot) -> None:
        """Holds a snapshot as the newest of its model."""
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
        """The snapshot if it is held; counts as a use."""
        with self._lock:
            if snapshot_id in self._held:
                self._held.move_to_end(snapshot_id)
            return self._held.get(snapshot_id)

    def drop_older(self) -> bool:
        """Drops all but the newest of each model; returns whether there were any."""
        with self._lock:
            count = len(self._held)
            self._shrink(0, set(self._newest.values()))
            return len(self._held) < count

    def spill(self) -> bool:
        """Moves what waits on a device to the host; returns whether there was anything. A push goes on from there."""
        with self._lock:
            away = [held for held in self._held.values() if any(t.device.type != "cpu" for t in held.tensors.values())]
        for held in away:
            moved = replace(held, tensors={name: tensor.cpu() for name, tensor in held.tensors.items()})
            with self._lock:
                if self._held.get(held.identity.snapshot_id) is held:
                    self._held[held.identity.snapshot_id] = moved
        return bool(away)

    def pin(self, snapshot_id: str) -> None:
        """Keeps a snapshot, once more, whatever room is made meanwhile: it is being sent."""
        with self._lock:
            self._pins[snapshot_id] += 1

    def unpin(self, snapshot_id: str) -> None:
        """Ends one `pin`; what only it kept is dropped if memory is short."""
        with self._lock:
            self._pins[snapshot_id] -= 1
            self._pins += Counter()  # without those at zero
            self._shrink(self.max_bytes, set(self._newest.values()))

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


def _global_bytes(snapshot: StoredSnapshot) -> int:
    return int(snapshot.identity.size_bytes)


def specs_of(tensors: Mapping[str, Tensor]) -> list[weights_pb2.TensorSpec]:
    """Name, type and shape of each on the wire, in order; of a sharded tensor, the whole shape."""
    return [
        weights_pb2.TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def size_of(specs: Iterable[weights_pb2.TensorSpec]) -> int:
    """Bytes of all tensors."""
    return sum(tensor_bytes(spec) for spec in specs)


def packed(specs: Sequence[weights_pb2.TensorSpec], tensors: Iterable[Tensor]) -> Tensor:
    """uint8 [n] on the tensors' device: what one broadcast carries, each tensor padded as the manifest has it."""
    parts: list[Tensor] = []
    for spec, tensor in zip(specs, tensors, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(flat)
        if missing := padded_bytes(spec) - flat.numel():
            parts.append(flat.new_zeros(missing))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpacked(specs: Iterable[weights_pb2.TensorSpec], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The way back from `packed`: views by name."""
    offset = 0
    for spec in specs:
        part = data.narrow(0, offset, tensor_bytes(spec))
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(*spec.shape)
        offset += padded_bytes(spec)


def packed_buckets(
    specs: Iterable[weights_pb2.TensorSpec], tensors: Iterable[Tensor], bucket_bytes: int
) -> Iterator[tuple[list[weights_pb2.TensorSpec], Tensor]]:
    """The broadcasts of a snapshot, one after another; looks at no more tensors than one of them needs."""
    rest = iter(tensors)
    for bucket in buckets(specs, bucket_bytes):
        yield bucket, packed(bucket, islice(rest, len(bucket)))


def digest_of(specs: Sequence[weights_pb2.TensorSpec], tensors: Iterable[Tensor]) -> str:
    """The digest of tensors, computed where they are."""
    digest = device_digest()
    for bucket, data in packed_buckets(specs, tensors, _DIGEST_BYTES):
        digest.add(bucket, data.view(torch.int64))
    return digest.hexdigest()
