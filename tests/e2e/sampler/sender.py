"""The trainer's side of a push, with only torch's process groups."""

import asyncio
import uuid
from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.manifest import Part, buckets, parts_of, sender_groups
from fovea_weights.weight_transfer import device_digest
from tests.e2e.sampler.reference import ALPHA

_BUCKET_BYTES = 1 << 20
_TIMEOUT_S = 60.0
Tensors = Mapping[str, torch.Tensor]


def manifest_of(snapshot_id: str, tensors: Tensors, rank: int | None = None) -> weights_pb2.SnapshotManifest:
    """Returns the manifest of an adapter of `rank`, or of full weights."""
    manifest = weights_pb2.SnapshotManifest(bucket_bytes=_BUCKET_BYTES)
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        manifest.tensors.add(name=name, dtype=dtype, shape=tensor.shape)
    digest = device_digest()
    digest.add(manifest.tensors, torch.cat([_padded(tensor) for tensor in tensors.values()]).view(torch.int64))
    kind = weights_pb2.SNAPSHOT_KIND_FULL if rank is None else weights_pb2.SNAPSHOT_KIND_ADAPTER
    manifest.snapshot.CopyFrom(
        weights_pb2.Snapshot(
            snapshot_id=snapshot_id,
            model_id=snapshot_id.partition("@")[0],
            digest=digest.hexdigest(),
            kind=kind,
            size_bytes=sum(_bytes(tensor).numel() for tensor in tensors.values()),
        )
    )
    if rank is not None:
        manifest.lora.CopyFrom(weights_pb2.LoraConfig(rank=rank, alpha=ALPHA))
    return manifest


class Sender:
    """Rank 0 of a group with the workers of one sampler.

    Args:
        is_split: Sends its own parts of tensors to each worker, over a group of its own.
    """

    def __init__(self, client: SamplerClient, is_split: bool = False) -> None:
        self._client = client
        self._is_split = is_split
        self.group_id = f"group-{uuid.uuid4().hex[:8]}"
        self.ready = sampler_pb2.SnapshotReady()

    async def join(self, timeout_s: float = _TIMEOUT_S) -> "Sender":
        """Joins the group."""
        timeout = timedelta(seconds=timeout_s)
        self._count = (await self._client.info()).transfer_worker_count if self._is_split else 1
        size = 2 if self._is_split else 1 + (await self._client.info()).transfer_worker_count
        self._store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        request = sampler_pb2.JoinTransferGroupRequest(
            group_id=self.group_id,
            master_address="127.0.0.1",
            master_port=self._store.port,
            rank_offset=1,
            world_size=size,
            timeout_s=timeout_s,
            is_split=self._is_split,
        )
        names = [sender_groups(self.group_id, 1, worker)[0] for worker in range(self._count)]
        stores = [dist.PrefixStore(name if self._is_split else self.group_id, self._store) for name in names]
        makes = [asyncio.to_thread(dist.ProcessGroupGloo, prefixed, 0, size, timeout) for prefixed in stores]
        joined: list[Any] = await asyncio.gather(*makes, self._client.join_transfer_group(request))
        self._groups = joined[:-1]
        return self

    async def push(
        self,
        snapshot_id: str,
        tensors: Tensors,
        rank: int | None = None,
        manifest: weights_pb2.SnapshotManifest | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> sampler_pb2.SnapshotLoaded:
        """Pushes a snapshot: broadcasts once the sampler is ready."""
        manifest = manifest or manifest_of(snapshot_id, tensors, rank)
        request = sampler_pb2.ReceiveSnapshotRequest(group_id=self.group_id, manifest=manifest, timeout_s=timeout_s)
        async for response in self._client.receive_snapshot(request):
            if response.WhichOneof("phase") == "ready":
                self.ready = response.ready
                await asyncio.to_thread(self.broadcast, manifest, tensors)
            else:
                return response.loaded
        raise AssertionError("the sampler ended the push without an error")

    def broadcast(self, manifest: weights_pb2.SnapshotManifest, tensors: Tensors, bucket_count: int = 1 << 30) -> None:
        """Sends the first `bucket_count` buckets."""
        rests = [iter(parts_of(manifest.tensors, self.ready, worker, self._count)) for worker in range(self._count)]
        for specs in buckets(manifest.tensors, manifest.bucket_bytes)[:bucket_count]:
            for group, rest in zip(self._groups, rests, strict=True):
                data = torch.cat([_padded(_cut(part, tensors[part.spec.name])) for part in islice(rest, len(specs))])
                if data.numel():
                    group.broadcast(data, 0).wait()

    def vanish(self) -> None:
        """Disconnects without notice, as a killed trainer does."""
        for group in self._groups:
            group.abort()
        del self._groups, self._store


def _cut(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    if part.is_whole:
        return tensor
    rows = [index for start, end in part.ranges for index in range(start, end)]
    return tensor.index_select(part.dimension, torch.tensor(rows, dtype=torch.int64))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    data = _bytes(tensor)
    return torch.cat([data, data.new_zeros(-data.numel() % 8)])
