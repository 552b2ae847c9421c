"""PushSnapshot: sends a snapshot from this trainer's memory to samplers.

Adapters are sent while training continues. Full parameters occupy all ranks.

A push has two phases, `ready` and `loaded`, after the members have joined a group. Every wait has a deadline.

    join a transfer group -> all report `ready` -> broadcast -> all report `loaded`

If a member fails, the trainer leaves the group and retries without that member.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from fovea.api.v1 import sampler_pb2, trainer_pb2, weights_pb2
from fovea.runtime.tasks import SharedLock
from fovea.wire.errors import FoveaError, Internal, InvalidInput, NotFound, Unavailable
from fovea.wire.manifest import buckets, division_problem, padded_bytes
from fovea_trainer import command_queue, trainer_metrics
from fovea_trainer.command_queue import CommandQueue
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.sampler_groups import Member, SamplerGroups, part_count
from fovea_trainer.weights.snapshot_store import PACKED, SnapshotStore, StoredSnapshot
from fovea_trainer.weights.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)

Responses = dict[str, sampler_pb2.ReceiveSnapshotResponse]
"""The responses of the samplers in one phase, keyed by address."""


@dataclass(frozen=True)
class Payload:
    """The snapshot to push.

    Args:
        manifest: Its manifest.
        send: Broadcasts it to an open group, given the group's id, the serialized division of its tensors over the
            workers of a sampler, the number of these workers (0 if the group is not split), and a timeout in seconds.
    """

    manifest: weights_pb2.SnapshotManifest
    send: Callable[[str, bytes, int, float], Awaitable[None]]

    @property
    def is_full(self) -> bool:
        """True for full parameters, which all ranks send. An adapter is sent by rank 0 alone."""
        return self.manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_FULL


@dataclass
class PushOutcome:
    """The result of a push for each sampler address.

    Args:
        loaded: Seconds for which each successful sampler paused.
        failed: The error of each failed sampler.
        refused: Failed samplers that rejected the snapshot as invalid, so that a retry cannot succeed.
        faulty: Failed samplers with an internal error, a wrong digest or a wrong division: a retry may fail alike.
    """

    loaded: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    faulty: set[str] = field(default_factory=set)

    def is_known(self, member: Member) -> bool:
        """Returns True if the result of this member is known."""
        return member.address in self.loaded or member.address in self.failed


class Delivery:
    """One push of a payload. `deadline` is a reading of `time.monotonic`."""

    def __init__(self, payload: Payload, groups: SamplerGroups, deadline: float) -> None:
        self._payload = payload
        self._snapshot = payload.manifest.snapshot
        self._groups = groups
        self._deadline = deadline
        self._outcome = PushOutcome()

    async def run(self, addresses: list[str]) -> PushOutcome:
        """Pushes the payload to the samplers at these addresses, except to samplers that have loaded it already."""
        members = []
        for address, found in (await self._groups.probe(addresses)).items():
            if isinstance(found, str):
                self._outcome.failed[address] = found
            elif self._snapshot.snapshot_id in found.adapter_ids:
                self._outcome.loaded[address] = 0.0
            else:
                members.append(found)
        kinds = {member: (member.backend, part_count([member], self._payload.is_full)) for member in members}
        for kind in sorted(set(kinds.values())):
            await self._serve([member for member in members if kinds[member] == kind])
        return self._outcome

    async def _serve(self, members: list[Member]) -> None:
        # Each round either finishes at least one sampler or splits the group.
        while members:
            if self._time_left() <= 0:
                self._outcome.failed |= {member.address: "the push ran out of time" for member in members}
                return
            error = await self._attempt(members)
            left = [member for member in members if not self._outcome.is_known(member)]
            if left == members and error is not None:
                return await self._serve_each(members, error)
            members = left

    async def _serve_each(self, members: list[Member], error: str) -> None:
        """Retries each member alone, after a group failed and no member reported an error.

        One unreachable member must not make the others fail.
        """
        for member in members:
            reason: str | None = error
            if len(members) > 1 and self._time_left() > 0:
                reason = await self._attempt([member])
            if member.address not in self._outcome.loaded:
                self._outcome.failed.setdefault(member.address, reason or error)

    async def _attempt(self, members: list[Member]) -> str | None:
        """Pushes once to a group of `members` and records the results. Returns the error if the group failed."""
        try:
            async with self._groups.joined(members, self._payload.is_full, self._deadline) as group_id:
                await self._transfer(group_id, members)
                if any(member.address in self._outcome.failed for member in members):
                    await self._groups.leave(members, self._payload.is_full)
        except (FoveaError, RuntimeError, TimeoutError) as error:
            return error.message if isinstance(error, FoveaError) else str(error) or type(error).__name__
        return None

    async def _transfer(self, group_id: str, members: list[Member]) -> None:
        timeout_s = max(1.0, self._time_left())
        request = sampler_pb2.ReceiveSnapshotRequest(
            group_id=group_id, manifest=self._payload.manifest, timeout_s=timeout_s
        )
        streams = {member.address: self._groups.client(member.address).receive_snapshot(request) for member in members}
        marks = [time.monotonic()]
        loaded: Responses = {}
        watching: asyncio.Future[None] | None = None
        try:
            ready: Responses = {}
            await self._phase(streams, "ready", ready)
            parts = part_count(members, self._payload.is_full)
            self._refuse_divisions(ready, parts)
            if any(address in self._outcome.failed for address in streams):
                return
            marks.append(time.monotonic())
            # Watch for failures during the broadcast, because an NCCL broadcast would wait for a member that has left.
            watching = asyncio.ensure_future(
                self._phase(streams, "loaded", loaded, lambda: self._groups.interrupt(group_id))
            )
            splits = {one.ready.SerializeToString(deterministic=True) for one in ready.values()}
            if len(splits) > 1:
                raise RuntimeError("the samplers divide the model differently over their workers")
            await asyncio.wait_for(self._payload.send(group_id, splits.pop(), parts, timeout_s), timeout_s + 5.0)
            marks.append(time.monotonic())
            await watching
            marks.append(time.monotonic())
            self._compare_digests(loaded)
            logger.info(
                "pushed %s, %d bytes, to %d samplers: ready after %.3f s, sent after %.3f s, loaded after %.3f s",
                *(self._snapshot.snapshot_id or "the base", self._snapshot.size_bytes, len(loaded)),
                *(later - earlier for earlier, later in pairwise(marks)),
            )
        except (RuntimeError, TimeoutError):
            # A member that left the group reports its error on its stream within a second. The others are retried.
            if watching is not None:
                await asyncio.wait([watching], timeout=1.0)
            self._compare_digests(loaded)
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
        responses: Responses,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Waits until every stream has sent `phase` or failed. Fills `responses`; records failures in the outcome.

        Args:
            streams: The response stream of each sampler, keyed by address.
            phase: Name of the expected phase, `ready` or `loaded`.
            responses: Receives the responses.
            on_failure: Called at the first failure. Later failures are its consequences and are not recorded.
        """
        broken = False

        def fail(address: str, error: str) -> None:
            nonlocal broken
            if broken:
                return
            self._outcome.failed[address] = error
            if on_failure is not None:
                broken = True
                on_failure()

        async def one(address: str) -> None:
            try:
                response = await asyncio.wait_for(anext(streams[address]), max(0.1, self._time_left()))
            except StopAsyncIteration:
                fail(address, f"it ended the transfer before it was {phase}")
            except TimeoutError:
                fail(address, f"it was not {phase} in time")
            except FoveaError as error:
                if isinstance(error, InvalidInput):
                    self._outcome.refused.add(address)
                elif isinstance(error, Internal):
                    self._outcome.faulty.add(address)
                fail(address, error.message)
            else:
                if response.WhichOneof("phase") == phase:
                    responses[address] = response
                else:
                    fail(address, f"it sent {response.WhichOneof('phase')} instead of {phase}")

        await asyncio.gather(*(one(address) for address in streams))

    def _refuse_divisions(self, ready: Responses, parts: int) -> None:
        """Records a failure of each sampler that divides the tensors in a way that no sender can follow."""
        for address, response in ready.items():
            if problem := division_problem(self._payload.manifest.tensors, response.ready, parts):
                self._outcome.failed[address] = f"its division of the tensors is invalid: {problem}"
                self._outcome.faulty.add(address)

    def _compare_digests(self, loaded: Responses) -> None:
        for address, response in loaded.items():
            if response.loaded.digest == self._snapshot.digest:
                self._outcome.loaded[address] = response.loaded.pause_s
                trainer_metrics.PUSHED_BYTES.inc(self._snapshot.size_bytes)
            else:
                self._outcome.faulty.add(address)
                self._outcome.failed[address] = (
                    f"it received data with digest {response.loaded.digest}, but the digest of the snapshot is"
                    f" {self._snapshot.digest}"
                )

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()


MIB = 2**20


class Pusher:
    """Pushes snapshots from rank 0's event loop: adapters concurrently, full parameters exclusively.

    A slow or dead sampler delays only pushes of adapters to exactly the same set of samplers, and pushes of full
    parameters.
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
        # Most of these threads only wait until members have joined or a broadcast is finished.
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="push")
        self._samplers = SamplerGroups(settings, queue, groups, self._threads)
        self._lock = SharedLock()

    async def push(self, request: trainer_pb2.PushSnapshotRequest) -> trainer_pb2.PushSnapshotResponse:
        """Pushes a snapshot to all samplers of the request.

        Raises:
            NotFound: Neither memory nor storage has the snapshot.
            Unavailable: No sampler received the snapshot.
            Internal: No sampler received the snapshot, because all had internal errors.
            InvalidInput: The request names no sampler, or one twice; or no sampler can load the snapshot, because the
                snapshot does not fit the samplers' model.
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
            kind = Internal if outcome.faulty.issuperset(outcome.failed) else Unavailable
            raise kind(f"no sampler received snapshot {request.snapshot_id!r}: {reasons}")
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

        async def in_thread(group_id: str, splits: bytes, part_count: int, timeout_s: float) -> None:
            await asyncio.get_running_loop().run_in_executor(self._threads, send, group_id, timeout_s)

        return Payload(manifest, in_thread)

    async def _full(self, snapshot_id: str) -> Payload:
        identity, specs = await self._queue.submit(command_queue.DescribeFull(snapshot_id))
        manifest = self._manifest(identity, specs)

        async def on_all_ranks(group_id: str, splits: bytes, part_count: int, timeout_s: float) -> None:
            command = command_queue.BroadcastFull(
                snapshot_id, group_id, splits, part_count, manifest.bucket_bytes, timeout_s
            )
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
