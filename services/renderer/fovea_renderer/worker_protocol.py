"""The protocol between the service and an image worker: messages over a socket pair, tensors in shared memory.

A worker has one job at a time. Both ends run the same version of this package on the same machine, so messages are
pickled.
"""

import fcntl
import math
import mmap
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from fovea.wire.tensors import FeatureTensors
from fovea_renderer.image_header import Cause, ImageHeader

_ALIGNMENT = 64

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
"""Allocates a tensor, given its name, shape and dtype."""


@dataclass(frozen=True)
class TensorPosition:
    """The position of one tensor in the shared memory; `offset` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SharedMemory:
    """Shared memory for the tensors of one image at a time. It grows to the size of the largest image so far.

    The memory is sealed against shrinking. Without the seal, a worker could truncate it and so kill the service with
    SIGBUS.

    Args:
        descriptor: The descriptor from `create`, in this process or inherited from the parent. `close` closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.positions: list[TensorPosition] = []
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> "SharedMemory":
        """Creates new memory. A child process that inherits the descriptor shares it."""
        descriptor = os.memfd_create("fovea-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(descriptor)

    def clear(self) -> None:
        """Forgets the tensors of the previous image."""
        self.positions.clear()

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Allocates a tensor behind the earlier ones and adds it to `positions`, for `copy` at the other end."""
        end = self.positions[-1].offset + self.positions[-1].size_bytes if self.positions else 0
        self.positions.append(TensorPosition(name, np.dtype(dtype).name, shape, -(-end // _ALIGNMENT) * _ALIGNMENT))
        return self._view(self.positions[-1])

    def copy(self, positions: list[TensorPosition]) -> FeatureTensors:
        """Returns copies of the tensors that the other end has written."""
        return {position.name: self._view(position).copy() for position in positions}

    def close(self) -> None:
        """Closes the memory. The system frees it once the other end has closed it too."""
        self._map = None
        os.close(self.descriptor)

    def _view(self, position: TensorPosition) -> npt.NDArray[Any]:
        end = position.offset + position.size_bytes
        if self._map is None or len(self._map) < end:
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, end)
            self._map = mmap.mmap(self.descriptor, end)
        return np.ndarray(position.shape, position.dtype, self._map, position.offset)


@dataclass(frozen=True)
class Ready:
    """The worker's first message: it has loaded the processor and processed a warm-up image."""

    settings: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True)
class Job:
    """One image to process: its header, the encoded file, and the most pixels of its longer side (0 keeps the size)."""

    header: ImageHeader
    data: bytes
    max_side: int = 0


@dataclass(frozen=True)
class Done:
    """The image has been processed. The tensors stay in the shared memory until the next job."""

    positions: list[TensorPosition]
    tensors_sha256: str
    seconds: float


@dataclass(frozen=True)
class Invalid:
    """The image cannot be rendered; see `InvalidChunk`."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class Failed:
    """The job failed, but the worker continues. `error` is for the log."""

    error: str
    out_of_memory: bool


def send(connection: Connection, message: Ready | Job | Done | Invalid | Failed) -> None:
    """Sends a message that `Connection.recv` can read.

    `Connection.send` would create its own pickler for each message, which costs five times as much.
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
