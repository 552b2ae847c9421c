"""Receives snapshots: joins a transfer group, checks the manifest, receives, verifies the digest, and loads."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.runtime.tasks import run_to_end
from fovea.wire import manifest as wire_manifest
from fovea.wire.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidInput
from fovea_sampler import sampler_metrics
from fovea_sampler.engine_api import WeightEngine
from fovea_sampler.weight_store import BASE, WeightStore

logger = logging.getLogger(__name__)

_FULL = weights_pb2.SNAPSHOT_KIND_FULL
_ADAPTER = weights_pb2.SNAPSHOT_KIND_ADAPTER


@dataclass(frozen=True)
class Ready:
    """The engine now takes part in the broadcast.

    Attributes:
        splits: The division of the tensors over the workers.
    """

    splits: sampler_pb2.SnapshotReady = field(default_factory=sampler_pb2.SnapshotReady)


@dataclass(frozen=True)
class Loaded:
    """The snapshot is loaded and can be sampled from.

    Attributes:
        digest: The digest of the received tensors.
        pause_s: Duration of the pause in generation, in seconds.
    """

    digest: str
    pause_s: float


class SnapshotPushes:
    """The receiving side of snapshot pushes.

    Each group carries one snapshot at a time, and full weights are loaded one at a time across all groups.
    """

    def __init__(self, engine: WeightEngine, weights: WeightStore) -> None:
        self._engine = engine
        self._weights = weights
        self._groups: dict[str, asyncio.Lock] = {}

    async def join(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        """Joins a group, after leaving an earlier group of the same name.

        Raises InvalidInput for a malformed request, Unavailable if the members do not all join in time.
        """
        _check_join(request)
        self._groups.pop(request.group_id, None)
        try:
            await self._engine.join_group(request)
        except BaseException:
            await run_to_end(self._engine.leave_group(request.group_id))
            raise
        self._groups[request.group_id] = asyncio.Lock()
        logger.info(
            "joined transfer group %s as rank %d of %d", request.group_id, request.rank_offset, request.world_size
        )

    async def leave(self, group_id: str) -> None:
        """Leaves a group. Leaving an unknown group does nothing."""
        self._groups.pop(group_id, None)
        await self._engine.leave_group(group_id)

    async def check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        """Raises InvalidInput for a manifest that does not fit the model."""
        await self._engine.check(manifest)

    async def receive(
        self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float
    ) -> AsyncGenerator[Ready | Loaded]:
        """Receives one snapshot: yields Ready, then Loaded.

        Raises InvalidInput for a manifest that does not fit the model, FailedPrecondition for a group that was not
        joined, AlreadyExists and ResourceExhausted as `WeightStore.check_adapter` does, Unavailable if the sender
        vanishes, DeadlineExceeded if the time runs out, and Internal if the received bytes differ from the announced
        ones. The previous weights do not change before all tensors have arrived and their digest is right.
        """
        _check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        kind = "adapter" if manifest.snapshot.kind == _ADAPTER else "full"
        outcome = "failed"
        try:
            self._check(manifest)
            lock = self._groups.get(group_id)
            if lock is None:
                raise FailedPrecondition(f"transfer group {group_id!r} does not exist; join it first", field="group_id")
            async with _within(deadline, "another snapshot is still arriving over this group"):
                await lock.acquire()
            try:
                async for phase in self._receive_alone(group_id, manifest, deadline):
                    outcome = "loaded" if isinstance(phase, Loaded) else outcome
                    yield phase
            finally:
                lock.release()
        finally:
            sampler_metrics.SNAPSHOTS.labels(kind, outcome).inc()

    async def _receive_alone(
        self, group_id: str, manifest: weights_pb2.SnapshotManifest, deadline: float
    ) -> AsyncGenerator[Ready | Loaded]:
        task_id, splits = await self._engine.start_receive(group_id, manifest, deadline - time.monotonic())
        arrived = False
        try:
            yield Ready(splits)
            digest = await self._receive_tensors(task_id, manifest, deadline - time.monotonic())
            arrived = True
            yield await self._load(task_id, manifest, digest, deadline)
        finally:
            if not arrived:
                # A broadcast that broke off leaves the members at different positions: the group cannot be used again.
                await run_to_end(self.leave(group_id))
            await run_to_end(self._engine.forget_task(task_id))

    def _check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        snapshot = manifest.snapshot
        if snapshot.kind == _ADAPTER and snapshot.snapshot_id == BASE:
            raise InvalidInput("an adapter needs a snapshot id", field="manifest.snapshot.snapshot_id")
        if snapshot.kind == _ADAPTER:  # refused now rather than after the broadcast
            self._weights.check_adapter(snapshot.snapshot_id, snapshot.digest, _size_bytes(manifest))

    async def _receive_tensors(self, task_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float) -> str:
        """Waits for the tensors and returns their digest. An adapter can be sampled from as soon as this returns."""
        snapshot = manifest.snapshot
        if snapshot.kind == _FULL or self._weights.holds_adapter(snapshot.snapshot_id):
            return await self._engine.wait_received(task_id, timeout_s)
        return await self._weights.hold_adapter(task_id, snapshot, manifest.lora.rank, _size_bytes(manifest), timeout_s)

    async def _load(self, task_id: str, manifest: weights_pb2.SnapshotManifest, digest: str, deadline: float) -> Loaded:
        snapshot = manifest.snapshot
        if digest != snapshot.digest:
            raise Internal(
                f"snapshot {snapshot.snapshot_id!r} arrived with digest {digest}, the manifest says {snapshot.digest}"
            )
        pause_s = 0.0
        if snapshot.kind == _FULL:
            async with _within(deadline, "requests in flight still sample from the current weights"):
                pause_s = await self._weights.load_full(task_id, snapshot)
            sampler_metrics.PAUSE_SECONDS.observe(pause_s)
        logger.info("loaded snapshot %r, %d bytes, pause %.3f s", snapshot.snapshot_id, _size_bytes(manifest), pause_s)
        return Loaded(digest, pause_s)


@asynccontextmanager
async def _within(deadline: float, reason: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded with `reason` once `time.monotonic()` passes `deadline`."""
    timeout = asyncio.timeout(max(deadline - time.monotonic(), 0))
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(f"the push ran out of time: {reason}") from None


def _check_join(request: sampler_pb2.JoinTransferGroupRequest) -> None:
    if not request.group_id:
        raise InvalidInput("group_id is empty", field="group_id")
    if not 0 < request.master_port < 65536:
        raise InvalidInput(f"master_port is {request.master_port}, must be between 1 and 65535", field="master_port")
    if not 1 <= request.rank_offset < request.world_size:
        last = request.world_size - 1
        raise InvalidInput(
            f"rank_offset is {request.rank_offset}, must be between 1 and world_size - 1 = {last}", field="rank_offset"
        )
    if request.sender_count < 0:
        raise InvalidInput(f"sender_count is {request.sender_count}, must not be negative", field="sender_count")
    _check_timeout(request.timeout_s)


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= 86_400:
        raise InvalidInput(f"timeout_s is {timeout_s:g}, must be above 0 and at most a day", field="timeout_s")


def _size_bytes(manifest: weights_pb2.SnapshotManifest) -> int:
    return sum(wire_manifest.tensor_bytes(spec) for spec in manifest.tensors)
