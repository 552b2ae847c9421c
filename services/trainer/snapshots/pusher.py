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
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from fovea.api.v1 import sampler_pb2, trainer_pb2, weights_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, Unavailable
from fovea.wire.manifest import buckets, padded_bytes
from services.trainer import commands, trainer_metrics
from services.trainer.command_queue import CommandQueue
from services.trainer.settings import TrainerSettings
from services.trainer.snapshots.snapshot_memory import PACKED, HeldSnapshot, SnapshotMemory
from services.trainer.snapshots.transfer_groups import TransferGroups
from services.trainer.snapshots.turns import Turns

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
IDLE_S = 600.0
"""A group that nobody was sent anything over for so long is left: its members may be gone for good."""
MIB = 2**20


@dataclass(frozen=True)
class Payload:
    """What is pushed, and how it is broadcast: `send` takes the id of an open group and a deadline in seconds."""

    manifest: weights_pb2.SnapshotManifest
    send: Callable[[str, float], Awaitable[None]]

    @property
    def is_full(self) -> bool:
        """Whether all ranks send, and take part."""
        return self.manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_FULL


@dataclass(frozen=True)
class Member:
    """A sampler as it presented itself for this push."""

    address: str
    instance_id: str
    worker_count: int
    backend: str
    holds: bool


Answers = dict[str, sampler_pb2.ReceiveSnapshotResponse]
"""What samplers said of a phase, by address."""

Members = frozenset[tuple[str, str]]
"""Address and instance of each sampler of a group."""


@dataclass
class OpenGroup:
    """A group that has met, and when it was used last, of `time.monotonic`."""

    group_id: str
    used_at: float


@dataclass
class Tally:
    """How it went with each sampler: seconds of pause, or what went wrong."""

    loaded: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Pusher:
    """Pushes snapshots, on rank 0's event loop: adapters side by side, full parameters alone.

    A sampler that is slow or dead keeps nobody waiting but those that push to the very same samplers.
    """

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
        self._open: dict[Members, OpenGroup] = {}
        # Most of them wait: for members to meet, or for a broadcast to leave.
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="push")
        self._turns = Turns()

    async def push(self, request: trainer_pb2.PushSnapshotRequest) -> trainer_pb2.PushSnapshotResponse:
        """Pushes to all samplers of the request.

        Raises NotFound if neither memory nor storage has the snapshot, Unavailable if no sampler got it.
        """
        addresses = list(request.samplers)
        if not addresses or len(set(addresses)) != len(addresses):
            raise InvalidInput("samplers must name at least one sampler, each once", field="samplers")
        started = time.monotonic()
        deadline = started + (request.timeout_s if request.timeout_s > 0 else self._settings.transfer_timeout_s)
        payload = await self._resolve(request)
        try:
            async with AsyncExitStack() as turn:
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        turns = self._turns.alone() if payload.is_full else self._turns.shared()
                        await turn.enter_async_context(turns)
                except TimeoutError:
                    raise Unavailable("other pushes took all the time that this one had") from None
                tally = await self._deliver(payload, addresses, deadline)
                await self._leave_idle()
        finally:
            if payload.is_full:
                await asyncio.shield(self._queue.submit(commands.UnpinFull(payload.manifest.snapshot.snapshot_id)))
        total_s = time.monotonic() - started
        trainer_metrics.PUSHES.labels("loaded").inc(len(tally.loaded))
        trainer_metrics.PUSHES.labels("failed").inc(len(tally.failed))
        trainer_metrics.PUSH_SECONDS.observe(total_s)
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
        for group in self._open.values():
            self._groups.close(group.group_id)
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
        present = {(member.address, member.instance_id) for member in found if isinstance(member, Member)}
        for key in [key for key in self._open if any(one[0] in addresses and one not in present for one in key)]:
            self._close(key)  # a member of it is gone
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
        lock = self._turns.of_group(key)
        try:
            await asyncio.wait_for(lock.acquire(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return "another push to the same samplers took all the time"
        try:
            group_id = await self._meet(key, members, deadline)
            await self._transfer(payload, group_id, members, deadline, tally)
            if any(member.address in tally.failed for member in members):
                await self._abandon(key)
        except (FoveaError, RuntimeError, TimeoutError) as error:
            await self._abandon(key)
            return error.message if isinstance(error, FoveaError) else str(error) or type(error).__name__
        except asyncio.CancelledError:
            self._close(key)  # the broadcast may be half done: nobody can use the group again
            raise
        finally:
            lock.release()
        return None

    async def _meet(self, key: Members, members: list[Member], deadline: float) -> str:
        if (group := self._open.get(key)) is not None:
            group.used_at = time.monotonic()
            return group.group_id
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
        self._open[key] = OpenGroup(group_id, time.monotonic())
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
        loaded: Answers = {}
        watching: asyncio.Future[Answers] | None = None
        try:
            ready = await self._phase(streams, "ready", deadline, tally, {})
            if len(ready) < len(streams):
                return
            marks.append(time.monotonic())
            # One that breaks off while tensors leave is noticed at once: a broadcast over nccl would wait for it.
            watching = asyncio.ensure_future(
                self._phase(streams, "loaded", deadline, tally, loaded, lambda: self._groups.close(group_id))
            )
            await asyncio.wait_for(payload.send(group_id, timeout_s), timeout_s + 5.0)
            marks.append(time.monotonic())
            await watching
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
            if watching is not None:
                await asyncio.wait([watching], timeout=1.0)
            self._settle(loaded, payload.manifest.snapshot, tally)
            raise
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            await asyncio.gather(*(stream.aclose() for stream in streams.values()), return_exceptions=True)  # type: ignore[attr-defined]

    async def _phase(
        self,
        streams: dict[str, AsyncIterator[sampler_pb2.ReceiveSnapshotResponse]],
        phase: str,
        deadline: float,
        tally: Tally,
        answers: Answers,
        on_failure: Callable[[], None] | None = None,
    ) -> Answers:
        """Waits until all streams have said `phase`; what they say goes into `answers`, who fails into `tally`.

        Args:
            on_failure: Called at the first failure, for which those that fail after it are not to blame.
        """
        broken = False

        def fail(address: str, error: str) -> None:
            nonlocal broken
            if broken:
                return
            tally.failed[address] = error
            if on_failure is not None:
                broken = True
                on_failure()

        async def one(address: str) -> None:
            try:
                response = await asyncio.wait_for(anext(streams[address]), max(0.1, deadline - time.monotonic()))
            except StopAsyncIteration:
                fail(address, f"it ended the transfer before it was {phase}")
            except TimeoutError:
                fail(address, f"it was not {phase} in time")
            except FoveaError as error:
                fail(address, error.message)
            else:
                if response.WhichOneof("phase") == phase:
                    answers[address] = response
                else:
                    fail(address, f"it said {response.WhichOneof('phase')} instead of {phase}")

        await asyncio.gather(*(one(address) for address in streams))
        return answers

    def _settle(
        self,
        responses: Answers,
        snapshot: weights_pb2.Snapshot,
        tally: Tally,
    ) -> None:
        for address, response in responses.items():
            if response.loaded.digest == snapshot.digest:
                tally.loaded[address] = response.loaded.pause_s
                trainer_metrics.PUSHED_BYTES.inc(snapshot.size_bytes)
            else:
                tally.failed[address] = f"it received digest {response.loaded.digest}, sent was {snapshot.digest}"

    async def _abandon(self, key: Members) -> None:
        """Leaves a group, and has its members leave."""
        if (group_id := self._close(key)) is None:
            return
        leaving = (self._client(address).leave_transfer_group(group_id, 2.0) for address, _ in key)
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.debug("leaving %s: %s", group_id, outcome)

    async def _leave_idle(self) -> None:
        before = time.monotonic() - IDLE_S
        for key in [key for key, group in self._open.items() if group.used_at < before]:
            await self._abandon(key)

    def _close(self, key: Members) -> str | None:
        group = self._open.pop(key, None)
        if group is None:
            return None
        self._groups.close(group.group_id)
        return group.group_id

    def _client(self, address: str) -> SamplerClient:
        if address not in self._clients:
            self._clients[address] = SamplerClient(address)
        return self._clients[address]
