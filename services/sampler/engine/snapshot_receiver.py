"""Joins groups and receives snapshots on threads, so that the engine goes on sampling while tensors arrive.

What arrives stays beside the model until it is whole and its digest is known: a sender that vanishes, or bytes that are
not what was announced, never touch the model. Where it waits: `staging`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.manifest import SnapshotDigest, buckets, padded_bytes, tensor_bytes
from services.sampler.engine.group import TransferGroup
from services.sampler.engine.staging import Staging

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

    def runs(self) -> Iterator[torch.Tensor]:
        """[n] of one element type each, the tensors one after another with their padding, as few as can be."""
        for specs, buffer in zip(_buckets(self.manifest), self.buffers, strict=True):
            start = 0
            for dtype, run in groupby(specs, lambda spec: spec.dtype):
                end = start + sum(map(padded_bytes, run))
                yield buffer[start:end].view(getattr(torch, dtype))
                start = end

    @property
    def device(self) -> torch.device:
        """Where it waits."""
        return self.buffers[0].device


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
        self._staging = Staging(device)
        # One for all arrivals: torch keeps memory apart by stream, and gives none of it to another.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._groups: dict[str, TransferGroup] = {}
        self._tasks: dict[str, Task] = {}
        self._arrivals: dict[str, Any] = {}

    def start_join(self, task_id: str, request: sampler_pb2.JoinTransferGroupRequest, backend: str) -> None:
        """Begins to join over `gloo` or `nccl`; a standing group of the same name is left first."""
        self.leave(request.group_id)

        def join(_: Task) -> None:
            device = torch.device("cpu") if backend == "gloo" else self._device
            self._groups[request.group_id] = TransferGroup(request, self._worker_rank, device)

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

        def receive(task: Task) -> None:
            arrival = Arrival(manifest)
            broadcasts = _buckets(manifest)
            sizes = [sum(map(padded_bytes, specs)) for specs in broadcasts]
            stays = self._staging.fits(sum(sizes))
            with torch.cuda.stream(self._stream):
                digest = SnapshotDigest(partial(torch.arange, device=self._device))
                for specs, size_bytes in zip(broadcasts, sizes, strict=True):
                    buffer = group.receive(size_bytes, deadline).to(self._device)
                    digest.add(specs, buffer.view(torch.int64))
                    arrival.buffers.append(buffer if stays else self._staging.to_host(buffer))
                arrival.digest = task.digest = digest.hexdigest()
                if self._stream is not None:
                    self._stream.synchronize()  # `finish` may read on the host what still comes over
                finished = finish(arrival)
            if self._stream is not None:
                self._stream.synchronize()
            self._arrivals[task_id] = finished

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
        flat = buffer[offset : offset + tensor_bytes(spec)]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(tuple(spec.shape))
        offset += padded_bytes(spec)
