"""PushSnapshot: brings a snapshot from this trainer's memory into samplers, in two phases, each wait with a deadline.

    resolve the snapshot -> meet the samplers in a group -> all say `ready` -> broadcast -> all say `loaded`

A group is kept for the next push to the same samplers and thrown away when a member fails; what can still be served is
then tried again without that member. Adapters are sent beside training; full parameters take all ranks.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from fovea.api.v1 import sampler_pb2, trainer_pb2, weights_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, Unavailable
from fovea.wire.manifest import buckets, padded_bytes
from services.trainer import commands, telemetry
from services.trainer.command_queue import CommandQueue
from services.trainer.settings import TrainerSettings
from services.trainer.snapshots import PACKED, HeldSnapshot, SnapshotMemory
from services.trainer.transfer import TransferGroups

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
MIB = 2**20


@dataclass(frozen=True)
class Payload:
    """What is pushed, and how it is broadcast: `send` takes the id of an open group and a deadline in seconds."""

    manifest: weights_pb2.SnapshotManifest
    send: Callable[[str, float], Awaitable[None]]


@dataclass(frozen=True)
class Member:
    """A sampler as it presented itself for this push."""

    address: str
    instance_id: str
    worker_count: int
    backend: str
    holds: bool


@dataclass
class Tally:
    """How it went with each sampler: seconds of pause, or what went wrong."""

    loaded: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Pusher:
    """Pushes snapshots, one push at a time, on rank 0's event loop."""

    def __init__(
        self,
        settings: TrainerSettings,
        queue: CommandQueue,
        groups: TransferGroups,
        adapters: Callable[[], SnapshotMemory],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._groups = groups
        self._adapters = adapters
        self._clients: dict[str, SamplerClient] = {}
        self._open: dict[frozenset[tuple[str, str]], str] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="push")
        self._lock = asyncio.Lock()

    async def push(self, request: trainer_pb2.PushSnapshotRequest) -> trainer_pb2.PushSnapshotResponse:
        """Pushes to all samplers of the request.

        Raises NotFound if neither memory nor storage has the snapshot, Unavailable if no sampler got it.
        """
        addresses = list(request.samplers)
        if not addresses or len(set(addresses)) != len(addresses):
            raise InvalidInput("samplers must name at least one sampler, each once", field="samplers")
        started = time.monotonic()
        deadline = started + (request.timeout_s if request.timeout_s > 0 else self._settings.transfer_timeout_s)
        async with self._lock:
            payload = await self._resolve(request)
            tally = await self._deliver(payload, addresses, deadline)
        total_s = time.monotonic() - started
        telemetry.PUSHES.labels("loaded").inc(len(tally.loaded))
        telemetry.PUSHES.labels("failed").inc(len(tally.failed))
        telemetry.PUSH_SECONDS.observe(total_s)
        for address, error in tally.failed.items():
            logger.warning("push of %s to %s failed: %s", request.snapshot_id or "the base", address, error)
        if not tally.loaded:
            reasons = "; ".join(f"{address}: {error}" for address, error in tally.failed.items())
            raise Unavailable(f"no sampler received snapshot {request.snapshot_id!r}: {reasons}")
        results = [
            trainer_pb2.PushResult(
                sampler=address, error=tally.failed.get(address, ""), pause_s=tally.loaded.get(address, 0.0)
            )
            for address in addresses
        ]
        return trainer_pb2.PushSnapshotResponse(snapshot=payload.manifest.snapshot, results=results, total_s=total_s)

    async def close(self) -> None:
        """Leaves all groups and closes all channels."""
        for group_id in self._open.values():
            self._groups.close(group_id)
        self._open.clear()
        for client in self._clients.values():
            await client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, request: trainer_pb2.PushSnapshotRequest) -> Payload:
        snapshot_id = request.snapshot_id
        if held := self._adapters().get(snapshot_id):
            return self._adapter(held)
        try:
            return await self._full(snapshot_id)
        except NotFound:
            if not request.uri:
                raise NotFound(
                    f"snapshot {snapshot_id!r} is no longer in memory, and no uri was given to read it from",
                    field="snapshot_id",
                ) from None
        await self._queue.submit(commands.RestoreSnapshot(snapshot_id, request.uri))
        held = self._adapters().get(snapshot_id)
        return self._adapter(held) if held else await self._full(snapshot_id)

    def _adapter(self, held: HeldSnapshot) -> Payload:
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
        identity, specs = await self._queue.submit(commands.DescribeFull(snapshot_id))
        manifest = self._manifest(identity, specs)

        async def on_all_ranks(group_id: str, timeout_s: float) -> None:
            command = commands.BroadcastFull(snapshot_id, group_id, manifest.bucket_bytes, timeout_s)
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

    async def _deliver(self, payload: Payload, addresses: list[str], deadline: float) -> Tally:
        tally = Tally()
        snapshot_id = payload.manifest.snapshot.snapshot_id
        found = await asyncio.gather(*(self._present(address, snapshot_id) for address in addresses))
        for address, member in zip(addresses, found, strict=True):
            if isinstance(member, str):
                tally.failed[address] = member
            elif member.holds:
                tally.loaded[address] = 0.0
        members = [member for member in found if isinstance(member, Member) and not member.holds]
        for backend in sorted({member.backend for member in members}):
            rest = [member for member in members if member.backend == backend]
            # Each round takes at least one sampler off the list, or splits it.
            while rest:
                if time.monotonic() >= deadline:
                    tally.failed |= {member.address: "the push ran out of time" for member in rest}
                    break
                error = await self._attempt(payload, rest, deadline, tally)
                left = [m for m in rest if m.address not in tally.loaded and m.address not in tally.failed]
                if left == rest and error is not None:
                    await self._one_by_one(payload, rest, deadline, tally, error)
                    break
                rest = left
        return tally

    async def _one_by_one(
        self, payload: Payload, members: list[Member], deadline: float, tally: Tally, error: str
    ) -> None:
        """For when a group failed and nobody in it says why: a member that cannot be met must not cost the others."""
        for member in members:
            reason: str | None = error
            if len(members) > 1 and time.monotonic() < deadline:
                reason = await self._attempt(payload, [member], deadline, tally)
            if member.address not in tally.loaded:
                tally.failed.setdefault(member.address, reason or error)

    async def _present(self, address: str, snapshot_id: str) -> Member | str:
        try:
            info = await self._client(address).info(INFO_TIMEOUT_S)
        except FoveaError as error:
            return f"it does not answer: {error.message}"
        return Member(
            address,
            info.instance_id,
            max(1, info.transfer_worker_count),
            info.transfer_backend,
            snapshot_id in info.adapter_snapshot_ids,
        )

    async def _attempt(self, payload: Payload, members: list[Member], deadline: float, tally: Tally) -> str | None:
        """One try with all of `members`: puts those whose fate is known into `tally`, returns what went wrong."""
        key = frozenset((member.address, member.instance_id) for member in members)
        try:
            group_id = self._open.get(key) or await self._meet(key, members, deadline)
            await self._transfer(payload, group_id, members, deadline, tally)
        except (FoveaError, RuntimeError, TimeoutError) as error:
            await self._abandon(key, members)
            return error.message if isinstance(error, FoveaError) else str(error) or type(error).__name__
        except asyncio.CancelledError:
            # The broadcast may be half done: nobody can use the group again.
            self._groups.close(self._open.pop(key, ""))
            raise
        if any(member.address in tally.failed for member in members):
            await self._abandon(key, members)
        return None

    async def _meet(self, key: frozenset[tuple[str, str]], members: list[Member], deadline: float) -> str:
        group_id = f"push-{uuid.uuid4().hex[:12]}"
        timeout_s = min(self._settings.join_timeout_s, max(1.0, deadline - time.monotonic()))
        world_size = 1 + sum(member.worker_count for member in members)
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(
            self._threads,
            self._groups.open,
            group_id,
            world_size,
            members[0].backend,
            timeout_s,
            self._settings.transfer_timeout_s,
        )
        joins = []
        offset = 1
        for member in members:
            request = sampler_pb2.JoinTransferGroupRequest(
                group_id=group_id,
                master_address=self._groups.address,
                master_port=self._groups.port,
                rank_offset=offset,
                world_size=world_size,
                timeout_s=timeout_s,
            )
            joins.append(asyncio.ensure_future(self._client(member.address).join_transfer_group(request)))
            offset += member.worker_count
        self._open[key] = group_id
        try:
            await asyncio.gather(opening, *joins)
        finally:
            for join in joins:
                join.cancel()
        return group_id

    async def _transfer(
        self, payload: Payload, group_id: str, members: list[Member], deadline: float, tally: Tally
    ) -> None:
        timeout_s = max(1.0, deadline - time.monotonic())
        request = sampler_pb2.ReceiveSnapshotRequest(group_id=group_id, manifest=payload.manifest, timeout_s=timeout_s)
        streams = {member.address: self._client(member.address).receive_snapshot(request) for member in members}
        marks = [time.monotonic()]
        try:
            ready = await self._phase(streams, "ready", deadline, tally)
            if len(ready) < len(streams):
                return
            marks.append(time.monotonic())
            await asyncio.wait_for(payload.send(group_id, timeout_s), timeout_s + 5.0)
            marks.append(time.monotonic())
            loaded = await self._phase(streams, "loaded", deadline, tally)
            marks.append(time.monotonic())
            self._settle(loaded, payload.manifest.snapshot, tally)
            snapshot = payload.manifest.snapshot
            logger.info(
                "pushed %s, %d bytes, to %d samplers: ready after %.3f s, sent after %.3f s, loaded after %.3f s",
                *(snapshot.snapshot_id or "the base", snapshot.size_bytes, len(loaded)),
                *(later - earlier for earlier, later in pairwise(marks)),
            )
        except (RuntimeError, TimeoutError):
            # Whoever has broken off says so on its stream; the others are innocent and are tried again.
            loaded = await self._phase(streams, "loaded", time.monotonic() + 1.0, tally, report_waiting=False)
            self._settle(loaded, payload.manifest.snapshot, tally)
            raise
        finally:
            await asyncio.gather(*(stream.aclose() for stream in streams.values()), return_exceptions=True)  # type: ignore[attr-defined]

    async def _phase(
        self,
        streams: dict[str, AsyncIterator[sampler_pb2.ReceiveSnapshotResponse]],
        phase: str,
        deadline: float,
        tally: Tally,
        report_waiting: bool = True,
    ) -> dict[str, sampler_pb2.ReceiveSnapshotResponse]:
        """Waits until every stream has said `phase`; those that fail go into `tally`."""

        async def one(address: str) -> sampler_pb2.ReceiveSnapshotResponse | None:
            try:
                response = await asyncio.wait_for(anext(streams[address]), max(0.1, deadline - time.monotonic()))
            except StopAsyncIteration:
                tally.failed[address] = f"it ended the transfer before it was {phase}"
            except TimeoutError:
                if report_waiting:
                    tally.failed[address] = f"it was not {phase} in time"
            except FoveaError as error:
                tally.failed[address] = error.message
            else:
                if response.WhichOneof("phase") == phase:
                    return response
                tally.failed[address] = f"it said {response.WhichOneof('phase')} instead of {phase}"
            return None

        answers = await asyncio.gather(*(one(address) for address in streams))
        return {address: answer for address, answer in zip(streams, answers, strict=True) if answer is not None}

    def _settle(
        self,
        responses: dict[str, sampler_pb2.ReceiveSnapshotResponse],
        snapshot: weights_pb2.Snapshot,
        tally: Tally,
    ) -> None:
        for address, response in responses.items():
            if response.loaded.digest == snapshot.digest:
                tally.loaded[address] = response.loaded.pause_s
                telemetry.PUSHED_BYTES.inc(snapshot.size_bytes)
            else:
                tally.failed[address] = f"it received digest {response.loaded.digest}, sent was {snapshot.digest}"

    async def _abandon(self, key: frozenset[tuple[str, str]], members: list[Member]) -> None:
        group_id = self._open.pop(key, None)
        if group_id is None:
            return
        self._groups.close(group_id)
        leaving = (self._client(member.address).leave_transfer_group(group_id, 2.0) for member in members)
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.debug("leaving %s: %s", group_id, outcome)

    def _client(self, address: str) -> SamplerClient:
        if address not in self._clients:
            self._clients[address] = SamplerClient(address)
        return self._clients[address]
