"""PushSnapshot: sends a snapshot from this trainer's memory to samplers.

Adapters are sent while training continues. Full parameters occupy all ranks.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

import torch

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.runtime.tasks import SharedLock
from fovea.wire.errors import InvalidInput, NotFound, Unavailable
from fovea.wire.manifest import buckets, padded_bytes
from fovea_services.trainer import command_queue, trainer_metrics
from fovea_services.trainer.command_queue import CommandQueue
from fovea_services.trainer.settings import TrainerSettings
from fovea_services.trainer.snapshots.delivery import Delivery, Payload
from fovea_services.trainer.snapshots.sampler_groups import SamplerGroups
from fovea_services.trainer.snapshots.snapshot_store import PACKED, SnapshotStore, StoredSnapshot
from fovea_services.trainer.snapshots.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)

MIB = 2**20


class Pusher:
    """Pushes snapshots from rank 0's event loop: adapters concurrently, full parameters exclusively.

    A slow or dead sampler delays only pushes to exactly the same set of samplers.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        queue: CommandQueue,
        groups: TransferGroups,
        adapters: Callable[[], SnapshotStore],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._groups = groups
        self._adapters = adapters
        # Most of these threads only wait, for members to join or for a broadcast to finish.
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="push")
        self._samplers = SamplerGroups(settings, queue, groups, self._threads)
        self._lock = SharedLock()

    async def push(self, request: trainer_pb2.PushSnapshotRequest) -> trainer_pb2.PushSnapshotResponse:
        """Pushes a snapshot to all samplers of the request.

        Raises:
            NotFound: Neither memory nor storage has the snapshot.
            Unavailable: No sampler received the snapshot.
            InvalidInput: No sampler can ever load the snapshot, because it does not fit their model.
        """
        addresses = list(request.samplers)
        if not addresses or len(set(addresses)) != len(addresses):
            raise InvalidInput("samplers must name at least one sampler, each once", field="samplers")
        started = time.monotonic()
        deadline = started + (request.timeout_s if request.timeout_s > 0 else self._settings.transfer_timeout_s)
        payload = await self._resolve(request)
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        lock = self._lock.exclusive() if payload.is_full else self._lock.shared()
                        await stack.enter_async_context(lock)
                except TimeoutError:
                    raise Unavailable("the push timed out while it waited for other pushes") from None
                outcome = await Delivery(payload, self._samplers, deadline).run(addresses)
                await self._samplers.leave_idle()
        finally:
            if payload.is_full:
                unpin = command_queue.UnpinFull(payload.manifest.snapshot.snapshot_id)
                await asyncio.shield(self._queue.submit(unpin))
        total_s = time.monotonic() - started
        trainer_metrics.PUSHES.labels("loaded").inc(len(outcome.loaded))
        trainer_metrics.PUSHES.labels("failed").inc(len(outcome.failed))
        trainer_metrics.PUSH_SECONDS.observe(total_s)
        for address, error in outcome.failed.items():
            logger.warning("push of %s to %s failed: %s", request.snapshot_id or "the base", address, error)
        if not outcome.loaded:
            reasons = "; ".join(f"{address}: {error}" for address, error in outcome.failed.items())
            if outcome.refused.issuperset(outcome.failed):
                raise InvalidInput(
                    f"no sampler accepts snapshot {request.snapshot_id!r}: {reasons}", field="snapshot_id"
                )
            raise Unavailable(f"no sampler received snapshot {request.snapshot_id!r}: {reasons}")
        results = [
            trainer_pb2.PushResult(
                sampler=address, error=outcome.failed.get(address, ""), pause_s=outcome.loaded.get(address, 0.0)
            )
            for address in addresses
        ]
        return trainer_pb2.PushSnapshotResponse(snapshot=payload.manifest.snapshot, results=results, total_s=total_s)

    async def close(self) -> None:
        """Leaves all groups and closes all channels."""
        await self._samplers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, request: trainer_pb2.PushSnapshotRequest) -> Payload:
        snapshot_id = request.snapshot_id
        if held := self._adapters().get(snapshot_id):
            return self._adapter(held)
        with suppress(NotFound):
            return await self._full(snapshot_id)
        await self._queue.submit(command_queue.RestoreSnapshot(snapshot_id, request.uri))
        held = self._adapters().get(snapshot_id)
        return self._adapter(held) if held else await self._full(snapshot_id)

    def _adapter(self, held: StoredSnapshot) -> Payload:
        manifest = self._manifest(held.identity, held.specs)
        assert held.lora is not None
        manifest.lora.CopyFrom(held.lora)

        def send(group_id: str, timeout_s: float) -> None:
            group = self._groups.get(group_id)
            sizes = [sum(map(padded_bytes, bucket)) for bucket in buckets(held.specs, manifest.bucket_bytes)]
            for data in torch.split(held.tensors[PACKED], sizes):
                group.send(data, timeout_s)

        async def in_thread(group_id: str, timeout_s: float) -> None:
            await asyncio.get_running_loop().run_in_executor(self._threads, send, group_id, timeout_s)

        return Payload(manifest, in_thread)

    async def _full(self, snapshot_id: str) -> Payload:
        identity, specs = await self._queue.submit(command_queue.DescribeFull(snapshot_id))
        manifest = self._manifest(identity, specs)

        async def on_all_ranks(group_id: str, timeout_s: float) -> None:
            command = command_queue.BroadcastFull(snapshot_id, group_id, manifest.bucket_bytes, timeout_s)
            error = await self._queue.submit(command)
            if error:
                raise RuntimeError(error)

        return Payload(manifest, on_all_ranks)

    def _manifest(
        self, identity: weights_pb2.Snapshot, specs: list[weights_pb2.TensorSpec]
    ) -> weights_pb2.SnapshotManifest:
        return weights_pb2.SnapshotManifest(
            snapshot=identity, tensors=specs, bucket_bytes=self._settings.transfer_bucket_mib * MIB
        )
