"""A sampler that only receives weights: a real gRPC servicer with its own gloo process groups, in the test's process.

With several workers it is one of vLLM's that divides each tensor by rows, if they are a multiple of the workers.
"""

# ruff: noqa: N802 -- methods are named by the proto

import asyncio
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

import grpc
import torch
import torch.distributed as dist

from fovea.api.v1 import sampler_pb2, sampler_pb2_grpc, weights_pb2
from fovea.wire.errors import InvalidInput, to_status
from fovea.wire.manifest import buckets, joined_digest, padded_bytes, parts_of, sender_groups, tensor_bytes
from fovea_weights.weight_transfer import PartSums

Event = sampler_pb2.ReceiveSnapshotResponse
Groups = list[dist.ProcessGroupGloo]


class ReceivingSampler(sampler_pb2_grpc.SamplerServiceServicer):
    """Joins groups and stores received snapshots by id.

    Args:
        worker_count: Workers that join groups.
        divides: False for a sampler of which all workers need whole tensors.
        is_old: True for a sampler of a version before split groups: it ignores `is_split` and does not report
            `receives_parts`.
    """

    def __init__(self, worker_count: int = 1, divides: bool = True, is_old: bool = False) -> None:
        self._worker_count = worker_count
        self._divides = divides
        self._is_old = is_old
        self._threads = ThreadPoolExecutor(16)  # a join that fails keeps its thread until its deadline
        self._splits: dict[str, bool] = {}
        self.received_bytes: list[int] = []
        self.instance_id = uuid.uuid4().hex
        self.received: dict[str, dict[str, torch.Tensor]] = {}
        self.manifests: dict[str, weights_pb2.SnapshotManifest] = {}
        self.joined: list[str] = []
        self.left: list[str] = []
        self.refuse_join = False
        self.refuse_manifest = False
        self.break_off = False
        self.lie_about_digest = False
        self.divide_wrongly = False
        self.may_join = asyncio.Event()
        self.may_join.set()
        self.asked_to_join = asyncio.Event()
        self._groups: dict[str, list[Groups]] = {}
        self._stores: list[dist.Store] = []

    async def start(self) -> None:
        """Listens on a free port."""
        self._server = grpc.aio.server()
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def restart(self) -> None:
        """Becomes another instance, without any state."""
        self.instance_id = uuid.uuid4().hex
        self.manifests.clear()
        self._groups.clear()
        self._stores.clear()

    async def stop(self) -> None:
        """Stops at once."""
        await self._server.stop(None)

    async def GetSamplerInfo(self, request: Any, context: Any) -> sampler_pb2.GetSamplerInfoResponse:
        return sampler_pb2.GetSamplerInfoResponse(
            instance_id=self.instance_id,
            transfer_backend="gloo",
            transfer_worker_count=self._worker_count,
            receives_parts=not self._is_old,
            adapter_snapshot_ids=[name for name, manifest in self.manifests.items() if manifest.HasField("lora")],
        )

    async def JoinTransferGroup(
        self, request: sampler_pb2.JoinTransferGroupRequest, context: Any
    ) -> sampler_pb2.JoinTransferGroupResponse:
        if self.refuse_join:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no route to the store")
        if self._is_old:
            request.is_split = False
        self.asked_to_join.set()
        await self.may_join.wait()
        self._groups[request.group_id] = await self._on_all(self._join, request)
        self._splits[request.group_id] = request.is_split
        self.joined.append(request.group_id)
        return sampler_pb2.JoinTransferGroupResponse(instance_id=self.instance_id)

    async def _on_all(self, work: Any, *arguments: Any) -> list[Any]:
        """Returns the results of all workers, each in a thread of its own."""
        run = asyncio.get_running_loop().run_in_executor
        return await asyncio.gather(*(run(self._threads, work, i, *arguments) for i in range(self._worker_count)))

    def _join(self, worker: int, request: sampler_pb2.JoinTransferGroupRequest) -> Groups:
        timeout = timedelta(seconds=request.timeout_s)
        store = dist.TCPStore(
            request.master_address, request.master_port, request.world_size, False, timeout, wait_for_workers=False
        )
        self._stores.append(store)
        own, rank = (worker, request.rank_offset) if request.is_split else (None, request.rank_offset + worker)
        return [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, request.world_size, timeout)
            for name in sender_groups(request.group_id, request.sender_count, own)
        ]

    async def LeaveTransferGroup(
        self, request: sampler_pb2.LeaveTransferGroupRequest, context: Any
    ) -> sampler_pb2.LeaveTransferGroupResponse:
        self._groups.pop(request.group_id, None)
        self.left.append(request.group_id)
        return sampler_pb2.LeaveTransferGroupResponse()

    async def ReceiveSnapshot(self, request: sampler_pb2.ReceiveSnapshotRequest, context: Any) -> AsyncIterator[Event]:
        if self.refuse_manifest:
            error = to_status(InvalidInput("manifest: no room"))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        ready = self._ready(request.manifest) if self._splits[request.group_id] else sampler_pb2.SnapshotReady()
        if self.divide_wrongly:
            del ready.splits[0].parts[0]
        yield Event(ready=ready)
        if self.break_off:
            # As in the contract: a receiver that fails leaves the group.
            del self._groups[request.group_id]
            await context.abort(grpc.StatusCode.INTERNAL, "the engine died")
        arrived = await self._on_all(self._receive, self._groups[request.group_id], request.manifest, ready)
        digest = self._joined(request.manifest, ready, arrived)
        yield Event(
            loaded=sampler_pb2.SnapshotLoaded(digest="0" * 64 if self.lie_about_digest else digest, pause_s=0.5)
        )

    def _ready(self, manifest: weights_pb2.SnapshotManifest) -> sampler_pb2.SnapshotReady:
        ready = sampler_pb2.SnapshotReady()
        for spec in manifest.tensors:
            rows = spec.shape[0] // self._worker_count if len(spec.shape) else 0
            is_even = rows * self._worker_count and tensor_bytes(spec) % (8 * self._worker_count) == 0
            is_cut = self._divides and is_even and rows * self._worker_count == spec.shape[0]
            ready.split_of.append(len(ready.splits) + 1 if is_cut else 0)
            if is_cut:
                bounds = [(i * rows, (i + 1) * rows) for i in range(self._worker_count)]
                ready.splits.add(dimension=0, parts=[weights_pb2.TensorPart(bounds=one) for one in bounds])
        return ready

    def _receive(
        self,
        worker: int,
        groups: list[Groups],
        manifest: weights_pb2.SnapshotManifest,
        ready: sampler_pb2.SnapshotReady,
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Returns one worker's parts of the tensors, and their sums."""
        sums, tensors = PartSums(), dict[str, torch.Tensor]()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        rest = iter(parts_of(manifest.tensors, ready, worker, self._worker_count))
        for number, bucket in enumerate(buckets(manifest.tensors, manifest.bucket_bytes)):
            parts = list(islice(rest, len(bucket)))
            sizes = [padded_bytes(part.spec) for part in parts]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            sender = groups[worker][number % len(groups[worker])]
            sender.broadcast([buffer], options).wait()
            sums.add(parts, buffer.view(torch.int64))
            for part, data in zip(parts, buffer.split(sizes), strict=True):
                own = data[: tensor_bytes(part.spec)].clone()
                tensors[part.spec.name] = own.view(getattr(torch, part.spec.dtype)).view(tuple(part.spec.shape))
        return tensors, sums.by_holders()

    def _joined(
        self,
        manifest: weights_pb2.SnapshotManifest,
        ready: sampler_pb2.SnapshotReady,
        arrived: list[tuple[dict[str, torch.Tensor], dict[str, int]]],
    ) -> str:
        """Stores the whole tensors. Returns the digest that all workers prove together."""
        parts = [tensors for tensors, _ in arrived]
        self.received_bytes = [sum(one.nbytes for one in tensors.values()) for tensors in parts]
        numbers = ready.split_of or [0] * len(manifest.tensors)
        self.received[manifest.snapshot.snapshot_id] = {
            spec.name: torch.cat([one[spec.name] for one in parts]) if number else parts[0][spec.name]
            for spec, number in zip(manifest.tensors, numbers, strict=True)
        }
        self.manifests[manifest.snapshot.snapshot_id] = manifest
        return joined_digest(manifest.tensors, [sums for _, sums in arrived])
