"""Joins groups and receives snapshots on threads, so that the engine goes on sampling while tensors arrive.

What arrives stays beside the model until it is whole and its digest is known: a sender that vanishes, or bytes that are
not what was announced, never touch the model. Where it waits: `host_offload`.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, groupby
from typing import Any, Literal

import torch
import torch.distributed

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.device_digest import device_digest
from fovea.shared_card import SharedCardGroup
from fovea.wire.manifest import buckets, padded_bytes, sender_groups, tensor_bytes
from fovea_services.sampler.engine.host_offload import SnapshotOffload

# Its stubs leave out half of what it exports.
dist: Any = torch.distributed

Phase = Literal["running", "done", "failed"]


@dataclass
class Arrival:
    """The tensors of one snapshot: for each bucket of the manifest its bytes, uint8 [n]."""

    manifest: weights_pb2.SnapshotManifest
    buffers: list[torch.Tensor]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order; views of the received bytes."""
        for specs, buffer in zip(_buckets(self.manifest), self.buffers, strict=True):
            yield from _cut(specs, buffer)

    def take_runs(self) -> Iterator[torch.Tensor]:
        """[n] of one element type each, the tensors one after another with their padding, as few as can be.

        Lets go of the bytes: what is not converted is the caller's alone.
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
    """Something that runs on a thread of a worker; polled by name through `collective_rpc`."""

    def __init__(self) -> None:
        self._phase: Phase = "running"
        self._error = ""
        self._digest = ""

    def run(self, work: Callable[[], str]) -> None:
        """Does `work`, which returns the digest of what it received, or the empty string."""
        try:
            self._digest = work()
            self._phase = "done"
        except Exception as error:  # a thread's failure is reported by `report`, wherever it came from
            self._error = f"{type(error).__name__}: {error}"
            self._phase = "failed"

    def report(self) -> dict[str, str]:
        """What the service is told."""
        return {"phase": self._phase, "error": self._error, "digest": self._digest}


class TransferGroupMember:
    """One worker's end of a transfer group, in which rank 0, the trainer, broadcasts bytes.

    Process groups of torch's, made privately, never the default one: one for each sender. Senders take turns.

    Args:
        request: Which group, where it meets, and how long to wait for the others.
        worker_rank: This worker's among those of its engine.
        backend: `gloo`, `nccl` or `cuda_ipc`.
        device: Where this worker's model lives.

    Blocks until all members have met. Raises RuntimeError or DistStoreError if they do not in time.
    """

    def __init__(
        self, request: sampler_pb2.JoinTransferGroupRequest, worker_rank: int, backend: str, device: torch.device
    ) -> None:
        self._device = torch.device("cpu") if backend == "gloo" else device
        timeout = timedelta(seconds=request.timeout_s)
        self._store = dist.TCPStore(
            request.master_address, request.master_port, request.world_size, False, timeout, wait_for_workers=False
        )
        host, rank = _own_address(request), request.rank_offset + worker_rank
        self._groups = [
            _open(dist.PrefixStore(name, self._store), rank, request.world_size, timeout, backend, self._device, host)
            for name in sender_groups(request.group_id, request.sender_count)
        ]

    def receive(self, sizes: Iterable[int], ahead: bool, deadline: float) -> Iterator[torch.Tensor]:
        """The broadcasts of a snapshot, uint8 [size in bytes] each on the group's device.

        Args:
            ahead: Whether one of each sender is received at a time, else one in all.
            deadline: Of `time.monotonic`.

        Raises RuntimeError if a sender is gone or the deadline passes; the group is of no use afterwards.
        """
        under_way: deque[tuple[torch.Tensor, Any]] = deque()
        for group, size_bytes in zip(cycle(self._groups), sizes, strict=False):
            if len(under_way) == (len(self._groups) if ahead else 1):
                yield _ended(*under_way.popleft(), deadline)
            buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = _until(deadline)
            under_way.append((buffer, group.broadcast([buffer], options)))
        while under_way:
            yield _ended(*under_way.popleft(), deadline)

    def close(self) -> None:
        """Gives up whatever is under way and leaves."""
        for group in self._groups:
            group.abort()


class SnapshotReceiver:
    """All groups and arrivals of one worker."""

    def __init__(self, device: torch.device, worker_rank: int) -> None:
        self._device = device
        self._worker_rank = worker_rank
        # One for all arrivals: torch keeps memory apart by stream, and gives none of it to another.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._offload = SnapshotOffload(device, self._stream)
        self._groups: dict[str, TransferGroupMember] = {}
        self._tasks: dict[str, Task] = {}
        self._arrivals: dict[str, Any] = {}

    def start_join(self, task_id: str, request: sampler_pb2.JoinTransferGroupRequest, backend: str) -> None:
        """Begins to join over `gloo`, `nccl` or `cuda_ipc`; a standing group of the same name is left first."""
        self.leave(request.group_id)

        def join() -> str:
            self._groups[request.group_id] = TransferGroupMember(request, self._worker_rank, backend, self._device)
            return ""

        self._start(task_id, join)

    def start_receive(
        self,
        task_id: str,
        group_id: str,
        manifest: weights_pb2.SnapshotManifest,
        timeout_s: float,
        finish: Callable[[Arrival], Any],
    ) -> None:
        """Begins to take part in the broadcasts of one snapshot. Raises KeyError for a group that was not joined.

        Args:
            finish: Called on the thread that received, with what arrived; what it returns is `arrival`'s.
        """
        group = self._groups[group_id]
        deadline = time.monotonic() + timeout_s

        def receive() -> str:
            with torch.cuda.stream(self._stream):
                arrival, digest = self._receive(group, manifest, deadline)
                if self._stream is not None:
                    self._stream.synchronize()  # `finish` may read on the host what still comes over
                finished = finish(arrival)
            if self._stream is not None:
                self._stream.synchronize()
            self._arrivals[task_id] = finished
            return digest

        self._start(task_id, receive)

    def report(self, task_id: str) -> dict[str, str]:
        """How far a task is. Raises KeyError for an unknown one."""
        return self._tasks[task_id].report()

    def arrival(self, task_id: str) -> Any:
        """What `finish` made of the tensors of a task that is done. Raises KeyError otherwise."""
        return self._arrivals[task_id]

    def forget(self, task_id: str) -> None:
        """Drops a task and its tensors. Unknown ones are no error."""
        self._tasks.pop(task_id, None)
        self._arrivals.pop(task_id, None)

    def leave(self, group_id: str) -> None:
        """Leaves a group; a broadcast under way fails. Unknown groups are no error."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            group.close()

    def _receive(
        self, group: TransferGroupMember, manifest: weights_pb2.SnapshotManifest, deadline: float
    ) -> tuple[Arrival, str]:
        """All broadcasts of a snapshot, and the digest of what came."""
        broadcasts = _buckets(manifest)
        sizes = [sum(map(padded_bytes, specs)) for specs in broadcasts]
        stays = self._offload.fits(sum(sizes))
        buffers: list[torch.Tensor] = []
        digest = device_digest()
        for specs, received in zip(broadcasts, group.receive(sizes, stays, deadline), strict=True):
            buffer = received.to(self._device)
            digest.add(specs, buffer.view(torch.int64))
            buffers.append(buffer if stays else self._offload.to_host(buffer))
        return Arrival(manifest, buffers), digest.hexdigest()

    def _start(self, task_id: str, work: Callable[[], str]) -> None:
        task = self._tasks[task_id] = Task()
        threading.Thread(target=task.run, args=(work,), name=f"transfer-{task_id}", daemon=True).start()


def _until(deadline: float) -> timedelta:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise RuntimeError("the transfer's time was up before all tensors had come")
    return timedelta(seconds=remaining_s)


def _ended(buffer: torch.Tensor, work: Any, deadline: float) -> torch.Tensor:
    work.wait(_until(deadline))
    return buffer


def _own_address(request: sampler_pb2.JoinTransferGroupRequest) -> str:
    """Of this machine's addresses the one that reaches the sender."""
    with socket.create_connection((request.master_address, request.master_port), request.timeout_s) as connection:
        return str(connection.getsockname()[0])


def _open(
    store: Any, rank: int, world_size: int, timeout: timedelta, backend: str, device: torch.device, host: str
) -> Any:
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # which listens on that one alone
        return dist.ProcessGroupGloo(store, rank, world_size, options)
    if backend == "cuda_ipc":
        return SharedCardGroup.meet(store, rank, world_size, timeout, device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # NCCL members meet at the first broadcast, not here.
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _buckets(manifest: weights_pb2.SnapshotManifest) -> list[list[weights_pb2.TensorSpec]]:
    return buckets(manifest.tensors, manifest.bucket_bytes)


def _cut(specs: list[weights_pb2.TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    offset = 0
    for spec in specs:
        flat = buffer[offset : offset + tensor_bytes(spec)]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(tuple(spec.shape))
        offset += padded_bytes(spec)
