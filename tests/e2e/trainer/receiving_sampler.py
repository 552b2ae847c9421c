"""A sampler that only receives weights: a real gRPC servicer with its own gloo process group, in the test's process."""

# ruff: noqa: N802 -- methods are named by the proto

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
import torch
import torch.distributed as dist

from fovea.api.v1 import sampler_pb2, sampler_pb2_grpc, weights_pb2
from fovea.wire.errors import InvalidInput, to_status
from fovea.wire.manifest import buckets, padded_bytes, sender_groups, tensor_bytes
from fovea_weights.weight_transfer import device_digest

Event = sampler_pb2.ReceiveSnapshotResponse


class ReceivingSampler(sampler_pb2_grpc.SamplerServiceServicer):
    """Joins groups and stores received snapshots by id."""

    def __init__(self) -> None:
        self.instance_id = uuid.uuid4().hex
        self.received: dict[str, dict[str, torch.Tensor]] = {}
        self.manifests: dict[str, weights_pb2.SnapshotManifest] = {}
        self.joined: list[str] = []
        self.left: list[str] = []
        self.refuse_join = False
        self.refuse_manifest = False
        self.break_off = False
        self.lie_about_digest = False
        self.may_join = asyncio.Event()
        self.may_join.set()
        self.asked_to_join = asyncio.Event()
        self._groups: dict[str, list[dist.ProcessGroupGloo]] = {}
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
            transfer_worker_count=1,
            adapter_snapshot_ids=[name for name, manifest in self.manifests.items() if manifest.HasField("lora")],
        )

    async def JoinTransferGroup(
        self, request: sampler_pb2.JoinTransferGroupRequest, context: Any
    ) -> sampler_pb2.JoinTransferGroupResponse:
        if self.refuse_join:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no route to the store")
        self.asked_to_join.set()
        await self.may_join.wait()
        self._groups[request.group_id] = await asyncio.to_thread(self._join, request)
        self.joined.append(request.group_id)
        return sampler_pb2.JoinTransferGroupResponse(instance_id=self.instance_id)

    def _join(self, request: sampler_pb2.JoinTransferGroupRequest) -> list[dist.ProcessGroupGloo]:
        timeout = timedelta(seconds=request.timeout_s)
        store = dist.TCPStore(
            request.master_address, request.master_port, request.world_size, False, timeout, wait_for_workers=False
        )
        self._stores.append(store)
        return [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), request.rank_offset, request.world_size, timeout)
            for name in sender_groups(request.group_id, request.sender_count)
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
        yield Event(ready=sampler_pb2.SnapshotReady())
        if self.break_off:
            # As in the contract: a receiver that fails leaves the group.
            del self._groups[request.group_id]
            await context.abort(grpc.StatusCode.INTERNAL, "the engine died")
        digest = await asyncio.to_thread(self._receive, self._groups[request.group_id], request.manifest)
        yield Event(
            loaded=sampler_pb2.SnapshotLoaded(digest="0" * 64 if self.lie_about_digest else digest, pause_s=0.5)
        )

    def _receive(self, groups: list[dist.ProcessGroupGloo], manifest: weights_pb2.SnapshotManifest) -> str:
        builder = device_digest()
        tensors: dict[str, torch.Tensor] = {}
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for number, bucket in enumerate(buckets(manifest.tensors, manifest.bucket_bytes)):
            buffer = torch.empty(sum(padded_bytes(spec) for spec in bucket), dtype=torch.uint8)
            groups[number % len(groups)].broadcast([buffer], options).wait()
            builder.add(bucket, buffer.view(torch.int64))
            for spec, part in zip(bucket, buffer.split([padded_bytes(spec) for spec in bucket]), strict=True):
                data = part[: tensor_bytes(spec)].clone()
                tensors[spec.name] = data.view(getattr(torch, spec.dtype)).view(tuple(spec.shape))
        self.received[manifest.snapshot.snapshot_id] = tensors
        self.manifests[manifest.snapshot.snapshot_id] = manifest
        return builder.hexdigest()
