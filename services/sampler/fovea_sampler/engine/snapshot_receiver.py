"""Joins transfer groups and receives snapshots on threads, so that the engine keeps sampling while tensors arrive.

Received tensors stay outside the model until all have arrived and their digest is known. A sender that vanishes, or
bytes that differ from the announced ones, therefore never change the model. `SnapshotOffload` chooses the memory in
which they wait.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import cycle, groupby, islice
from typing import Any, Literal

import torch
import torch.distributed

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.manifest import Part, buckets, most_placed_bytes, padded_bytes, parts_of, sender_groups, tensor_bytes
from fovea_sampler.engine.engine_arguments import WORKING_BYTES
from fovea_weights.weight_transfer import PartSums, device_digest, open_group, placed

# The type stubs of torch.distributed omit half of its exports.
dist: Any = torch.distributed

logger = logging.getLogger(__name__)

Phase = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class Receipt:
    """The result of a receiving task.

    Attributes:
        digest: The digest of the tensors; empty if this worker received parts of them, or nothing.
        sums: Of parts: the sums of their mixed words, by the workers that receive them; see `joined_digest`.
        size_bytes: The bytes received.
    """

    digest: str = ""
    sums: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0


@dataclass
class Arrival:
    """The tensors of one received snapshot.

    Attributes:
        manifest: The manifest of the snapshot.
        parts: The parts of tensors that this worker received, for each bucket of the manifest.
        buffers: Their bytes, uint8 [n] for each bucket.
        room: Memory that `tensors` frees and needs again, uint8 [n], so that it is not missing after sampling paused.
    """

    manifest: weights_pb2.SnapshotManifest
    parts: list[list[Part]]
    buffers: list[torch.Tensor]
    room: torch.Tensor | None = None

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the tensor of each entry, in the manifest's order, without those that have no part here.

        A whole tensor is a view of the received bytes. The others are made on `device` when they are asked for, with
        NaN in place of what did not arrive. The loader decides how long it keeps them; see `most_placed_bytes`.
        """
        self.room = None
        for parts, buffer in zip(self.parts, self.buffers, strict=True):
            for part, (_, own) in zip(parts, _cut([part.spec for part in parts], buffer), strict=True):
                if part.is_whole:
                    yield part.spec.name, own
                elif own.numel():
                    yield part.spec.name, placed(part, own, device)

    def take_runs(self) -> Iterator[torch.Tensor]:
        """Yields the tensors, with their padding, concatenated into runs [n] of one element type each.

        The arrival drops its references to the bytes: afterwards only the caller holds them.
        """
        buffers, self.buffers = self.buffers, []
        for specs, buffer in zip(_buckets(self.manifest), buffers, strict=True):
            start = 0
            for dtype, run in groupby(specs, lambda spec: spec.dtype):
                end = start + sum(map(padded_bytes, run))
                yield buffer[start:end].view(getattr(torch, dtype))
                start = end

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device


class Task:
    """Work that runs on a thread of a worker. The service polls its report through `collective_rpc`."""

    def __init__(self) -> None:
        self._phase: Phase = "running"
        self._error = ""
        self._receipt = Receipt()

    def run(self, work: Callable[[], Receipt]) -> None:
        """Runs `work`."""
        try:
            self._receipt = work()
            self._phase = "done"
        except Exception as error:  # `report` passes any failure of the thread on to the service
            self._error = f"{type(error).__name__}: {error}"
            self._phase = "failed"

    def report(self) -> dict[str, Any]:
        """Returns the phase, the error and the receipt of the task."""
        return {"phase": self._phase, "error": self._error, **asdict(self._receipt)}


class TransferGroupMember:
    """One worker's membership in a transfer group. Rank 0, the trainer, broadcasts bytes to the other ranks.

    In a split group each worker of a sampler receives bytes of its own.

    The group consists of one private process group of torch per sender, instead of torch's default group. The senders
    broadcast in rotation. The constructor blocks until all members have joined.

    Args:
        request: The group, the address of its store, and the time to wait for the other members.
        worker_rank: The rank of this worker in its engine.
        backend: `gloo`, `nccl` or `cuda_ipc`.
        device: The device of this worker's model.

    Raises RuntimeError or DistStoreError if the members do not all join in time.
    """

    def __init__(
        self, request: sampler_pb2.JoinTransferGroupRequest, worker_rank: int, backend: str, device: torch.device
    ) -> None:
        self._device = torch.device("cpu") if backend == "gloo" else device
        timeout = timedelta(seconds=request.timeout_s)
        self._store = dist.TCPStore(
            request.master_address, request.master_port, request.world_size, False, timeout, wait_for_workers=False
        )
        self.is_split = request.is_split
        host, rank = _own_address(request), request.rank_offset + (0 if self.is_split else worker_rank)
        self._groups = [
            open_group(
                dist.PrefixStore(name, self._store),
                rank,
                request.world_size,
                backend,
                self._device,
                host,
                timeout,
                timeout,
            )
            for name in sender_groups(request.group_id, request.sender_count, worker_rank if self.is_split else None)
        ]

    def receive(self, sizes: Iterable[int], ahead: bool, deadline: float) -> Iterator[torch.Tensor]:
        """Yields the broadcasts of a snapshot, uint8 [size] each, on the group's device.

        Args:
            sizes: The size of each broadcast in bytes; nothing is sent for 0.
            ahead: True to receive one broadcast of every sender at a time, False to receive a single one at a time.
            deadline: The time limit, by `time.monotonic`.

        Raises RuntimeError if a sender is gone or the deadline passes; the group cannot be used afterwards.
        """
        under_way: deque[tuple[torch.Tensor, Any]] = deque()
        for group, size_bytes in zip(cycle(self._groups), sizes, strict=False):
            if len(under_way) == (len(self._groups) if ahead else 1):
                yield _ended(*under_way.popleft(), deadline)
            buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = _until(deadline)
            under_way.append((buffer, group.broadcast([buffer], options) if size_bytes else None))
        while under_way:
            yield _ended(*under_way.popleft(), deadline)

    def close(self) -> None:
        """Aborts running broadcasts and leaves the group."""
        for group in self._groups:
            group.abort()


class SnapshotOffload:
    """The choice of memory for an arriving snapshot: the device if there is room, else pinned host memory.

    Loading full weights from pinned memory pauses sampling for the transfer time of the bus. Loading them from ordinary
    memory pauses sampling for over a second for 9 GB (measured): the driver copies them through a small buffer of its
    own, and the engine's kernel launches wait meanwhile. Pinned memory costs no KV cache. The first push that needs
    pinned memory allocates it, and torch caches it for later pushes.

    Args:
        device: The device on which broadcasts arrive.
        stream: The CUDA stream on which they arrive; None on a CPU.
        working_bytes: GPU memory that must stay free beside an arriving snapshot.
    """

    def __init__(self, device: torch.device, stream: Any = None, working_bytes: int = WORKING_BYTES) -> None:
        self._device = device
        self._stream = stream
        self._working_bytes = working_bytes
        self._can_pin = device.type == "cuda"
        # torch's allocator caches memory per stream. This thread loads.
        self._loading = torch.cuda.current_stream(device) if stream is not None else None

    def fits(self, size_bytes: int) -> bool:
        """Returns True if a snapshot of this size may wait on the device itself."""
        if self._device.type != "cuda":
            return True
        lacking_bytes = size_bytes + self._working_bytes - torch.cuda.mem_get_info(self._device)[0]
        return lacking_bytes < 0 or lacking_bytes < self._left_bytes()

    def _left_bytes(self) -> int:
        """Returns the bytes that earlier snapshots used and that torch's allocator keeps cached for this stream."""
        own = self._device.index, getattr(self._stream, "cuda_stream", None)
        segments: list[Any] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            one["total_size"] - one["allocated_size"] for one in segments if (one["device"], one["stream"]) == own
        )

    def reserve(self, size_bytes: int) -> torch.Tensor:
        """Returns memory of the device, uint8 [size_bytes], which the loading thread can use once it is freed.

        Raises RuntimeError if there is none.
        """
        try:
            with torch.cuda.stream(self._loading):
                return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            needed = f"loading needs {size_bytes / 2**30:.1f} GiB beside the snapshot for tensors in full shape"
            raise RuntimeError(f"{needed}; lower --gpu-memory-fraction: {error}") from None

    def to_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `buffer`, uint8 [n], in host memory.

        The copy is complete once the current stream has executed all work queued so far.
        """
        if self._can_pin:
            try:
                pinned = torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True)
                return pinned.copy_(buffer, non_blocking=True)
            except RuntimeError as error:  # the limit on locked memory is exceeded, or memory is exhausted
                self._can_pin = False
                logger.warning(
                    "memory cannot be pinned (%s): snapshots now wait in ordinary host memory, and loading full "
                    "weights pauses sampling for about 0.13 s per GB. Allow more locked memory, or reserve GPU memory "
                    "with --full-push-room always",
                    error,
                )
        return buffer.to("cpu")


class SnapshotReceiver:
    """All transfer groups and received snapshots of one worker."""

    def __init__(self, device: torch.device, worker_rank: int, worker_count: int) -> None:
        self._device = device
        self._worker_rank = worker_rank
        self._worker_count = worker_count
        # All arrivals share one stream, because a new one could not reuse memory that the allocator has cached.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._offload = SnapshotOffload(device, self._stream)
        self._groups: dict[str, TransferGroupMember] = {}
        self._tasks: dict[str, Task] = {}
        self._arrivals: dict[str, Any] = {}

    def start_join(self, task_id: str, request: sampler_pb2.JoinTransferGroupRequest, backend: str) -> None:
        """Starts to join a group over `gloo`, `nccl` or `cuda_ipc`, after leaving an earlier group of the same name."""
        self.leave(request.group_id)

        def join() -> Receipt:
            self._groups[request.group_id] = TransferGroupMember(request, self._worker_rank, backend, self._device)
            return Receipt()

        self._start(task_id, join)

    def is_split(self, group_id: str) -> bool:
        """Returns True if the workers receive parts over a group. Raises KeyError for one that was not joined."""
        return self._groups[group_id].is_split

    def start_receive(
        self,
        task_id: str,
        group_id: str,
        manifest: weights_pb2.SnapshotManifest,
        timeout_s: float,
        finish: Callable[[Arrival], Any],
        ready: sampler_pb2.SnapshotReady,
    ) -> None:
        """Starts to receive the broadcasts of one snapshot. Raises KeyError for a group that was not joined.

        Args:
            task_id: The id of the new task.
            group_id: The group over which the snapshot is broadcast.
            manifest: The manifest of the snapshot.
            timeout_s: Seconds within which the snapshot must arrive.
            finish: Called with the Arrival on the receiving thread; `arrival` returns its result.
            ready: The division of the tensors over the workers.
        """
        group = self._groups[group_id]
        deadline = time.monotonic() + timeout_s

        def receive() -> Receipt:
            parts = parts_of(manifest.tensors, ready, self._worker_rank, self._worker_count)
            with torch.cuda.stream(self._stream):
                arrival, receipt = self._receive(group, manifest, parts, deadline)
                if self._stream is not None:
                    self._stream.synchronize()  # `finish` may read host memory to which copies are still running
                finished = finish(arrival)
            if self._stream is not None:
                self._stream.synchronize()
            self._arrivals[task_id] = finished
            return receipt

        self._start(task_id, receive)

    def report(self, task_id: str) -> dict[str, Any]:
        """Returns the report of a task. Raises KeyError for an unknown one."""
        return self._tasks[task_id].report()

    def arrival(self, task_id: str) -> Any:
        """Returns the result of `finish` for a task that is done. Raises KeyError for any other task."""
        return self._arrivals[task_id]

    def forget(self, task_id: str) -> None:
        """Drops a task and its tensors. Unknown tasks are ignored."""
        self._tasks.pop(task_id, None)
        self._arrivals.pop(task_id, None)

    def leave(self, group_id: str) -> None:
        """Leaves a group; a broadcast that is running in it fails. Unknown groups are ignored."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            group.close()

    def _receive(
        self, group: TransferGroupMember, manifest: weights_pb2.SnapshotManifest, parts: list[Part], deadline: float
    ) -> tuple[Arrival, Receipt]:
        """Receives all broadcasts of a snapshot; returns the arrival and the receipt of its tensors."""
        rest = iter(parts)
        broadcasts = [list(islice(rest, len(specs))) for specs in _buckets(manifest)]
        sizes = [sum(padded_bytes(part.spec) for part in bucket) for bucket in broadcasts]
        divided = [part for part in parts if not part.is_whole and tensor_bytes(part.spec)]
        placed_bytes = most_placed_bytes((part.spec.name, tensor_bytes(part.whole)) for part in divided)
        room: torch.Tensor | None = self._offload.reserve(placed_bytes)
        stays = self._offload.fits(sum(sizes))
        room = room if stays else None  # the engine may use the memory while the snapshot arrives
        buffers: list[torch.Tensor] = []
        digest, sums = device_digest(), PartSums()
        for bucket, received in zip(broadcasts, group.receive(sizes, stays, deadline), strict=True):
            buffer = received.to(self._device)
            words = buffer.view(torch.int64)
            if group.is_split:
                sums.add(bucket, words)
            else:
                digest.add([part.spec for part in bucket], words)
            buffers.append(buffer if stays else self._offload.to_host(buffer))
        found = "" if group.is_split else digest.hexdigest()
        room = self._offload.reserve(placed_bytes) if room is None else room
        return Arrival(manifest, broadcasts, buffers, room), Receipt(found, sums.by_holders(), sum(sizes))

    def _start(self, task_id: str, work: Callable[[], Receipt]) -> None:
        task = self._tasks[task_id] = Task()
        threading.Thread(target=task.run, args=(work,), name=f"transfer-{task_id}", daemon=True).start()


def _until(deadline: float) -> timedelta:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise RuntimeError("the transfer timed out before all tensors had arrived")
    return timedelta(seconds=remaining_s)


def _ended(buffer: torch.Tensor, work: Any, deadline: float) -> torch.Tensor:
    if work is not None:
        work.wait(_until(deadline))
    return buffer


def _own_address(request: sampler_pb2.JoinTransferGroupRequest) -> str:
    """Returns the address that this machine uses to reach the sender."""
    with socket.create_connection((request.master_address, request.master_port), request.timeout_s) as connection:
        return str(connection.getsockname()[0])


def _buckets(manifest: weights_pb2.SnapshotManifest) -> list[list[weights_pb2.TensorSpec]]:
    return buckets(manifest.tensors, manifest.bucket_bytes)


def _cut(specs: list[weights_pb2.TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    offset = 0
    for spec in specs:
        flat = buffer[offset : offset + tensor_bytes(spec)]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(tuple(spec.shape))
        offset += padded_bytes(spec)
