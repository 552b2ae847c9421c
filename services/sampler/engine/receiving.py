"""Joins groups and receives snapshots on threads, so that the engine goes on sampling while tensors arrive.

What arrives is kept in host memory until it is whole and its digest is known: a sender that vanishes, or bytes that are
not what was announced, never touch the model.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import DigestBuilder, buckets, tensor_bytes
from services.sampler.engine.group import TransferGroup

Phase = Literal["running", "done", "failed"]


@dataclass
class Arrival:
    """The tensors of one snapshot, complete once `Task.phase` is done."""

    manifest: weights_pb2.SnapshotManifest
    buffers: list[torch.Tensor] = field(default_factory=list)
    digest: str = ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order; views of the received bytes."""
        for specs, buffer in zip(_buckets(self.manifest), self.buffers, strict=True):
            yield from _cut(specs, buffer)


@dataclass
class Task:
    """Something that runs on a thread of a worker; polled by name through `collective_rpc`."""

    phase: Phase = "running"
    error: str = ""
    digest: str = ""

    def report(self) -> dict[str, str]:
        """What the service is told."""
        return {"phase": self.phase, "error": self.error, "digest": self.digest}


class SnapshotReceiver:
    """All groups and arrivals of one worker."""

    def __init__(self, device: torch.device, worker_rank: int) -> None:
        self._device = device
        self._worker_rank = worker_rank
        self._groups: dict[str, TransferGroup] = {}
        self._tasks: dict[str, Task] = {}
        self._arrivals: dict[str, Arrival] = {}

    def start_join(
        self,
        task_id: str,
        group_id: str,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
        backend: str,
    ) -> None:
        """Begins to join over `gloo` or `nccl`; a standing group of the same name is left first."""
        self.leave(group_id)

        def join(_: Task) -> None:
            rank = rank_offset + self._worker_rank
            device = torch.device("cpu") if backend == "gloo" else self._device
            self._groups[group_id] = TransferGroup(
                group_id, master_address, master_port, rank, world_size, timeout_s, device
            )

        self._start(task_id, join)

    def start_receive(
        self, task_id: str, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float
    ) -> None:
        """Begins to take part in the broadcasts of one snapshot. Raises KeyError for a group that was not joined."""
        group = self._groups[group_id]
        deadline = time.monotonic() + timeout_s

        def receive(task: Task) -> None:
            arrival = Arrival(manifest)
            digest = DigestBuilder()
            for specs in _buckets(manifest):
                buffer = group.receive(sum(tensor_bytes(spec) for spec in specs), deadline)
                offset = 0
                for spec in specs:
                    end = offset + tensor_bytes(spec)
                    digest.add(spec.name, spec.dtype, list(spec.shape), buffer[offset:end].numpy().data)
                    offset = end
                arrival.buffers.append(buffer)
            arrival.digest = task.digest = digest.hexdigest()
            self._arrivals[task_id] = arrival

        self._start(task_id, receive)

    def report(self, task_id: str) -> dict[str, str]:
        """How far a task is. Raises KeyError for an unknown one."""
        return self._tasks[task_id].report()

    def arrival(self, task_id: str) -> Arrival:
        """The tensors of a task that is done. Raises KeyError otherwise."""
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

    def _start(self, task_id: str, work: Callable[[Task], None]) -> None:
        task = self._tasks[task_id] = Task()

        def run() -> None:
            try:
                work(task)
                task.phase = "done"
            except Exception as error:  # a thread's failure is reported by `report`, wherever it came from
                task.error = f"{type(error).__name__}: {error}"
                task.phase = "failed"

        threading.Thread(target=run, name=f"transfer-{task_id}", daemon=True).start()


def _buckets(manifest: weights_pb2.SnapshotManifest) -> list[list[weights_pb2.TensorSpec]]:
    return buckets(manifest.tensors, manifest.bucket_bytes)


def _cut(specs: list[weights_pb2.TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    offset = 0
    for spec in specs:
        end = offset + tensor_bytes(spec)
        flat = buffer[offset:end]
        # A view needs an aligned start, which a bucket of mixed types may not give.
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()
        yield spec.name, flat.view(dtype).view(tuple(spec.shape))
        offset = end
