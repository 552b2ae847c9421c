"""What the service and one image worker say to each other: messages over a socket pair, tensors in shared memory.

One job at a time. Both ends are this package in the same version on the same machine, so messages are pickled.
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

from fovea.wire.features import FeatureTensors
from fovea_services.renderer.chunk_errors import Cause
from fovea_services.renderer.image_header import ImageHeader

_ALIGNMENT = 64

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
"""Makes room for the tensor of a name, with a shape and a dtype."""


@dataclass(frozen=True)
class Place:
    """Where one tensor lies, its offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SharedMemory:
    """The tensors of one image at a time. Takes as many bytes as the largest image so far needed.

    It is sealed against shrinking: a worker that truncated it would end the service with SIGBUS.

    Args:
        descriptor: What `create` made, here or in the process that started this one; closed by `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.places: list[Place] = []
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> "SharedMemory":
        """Fresh memory of this process; a child that inherits the descriptor sees the same."""
        descriptor = os.memfd_create("fovea-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(descriptor)

    def clear(self) -> None:
        """Forgets the tensors of the image before."""
        self.places.clear()

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for a tensor after those that are there. `places` then says where, for `copy` at the other end."""
        end = self.places[-1].offset + self.places[-1].size_bytes if self.places else 0
        self.places.append(Place(name, np.dtype(dtype).name, shape, -(-end // _ALIGNMENT) * _ALIGNMENT))
        return self._view(self.places[-1])

    def copy(self, places: list[Place]) -> FeatureTensors:
        """Copies of the tensors that the other end has made."""
        return {place.name: self._view(place).copy() for place in places}

    def close(self) -> None:
        """Gives the memory back once the other end has closed it too."""
        self._map = None
        os.close(self.descriptor)

    def _view(self, place: Place) -> npt.NDArray[Any]:
        end = place.offset + place.size_bytes
        if self._map is None or len(self._map) < end:
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, end)
            self._map = mmap.mmap(self.descriptor, end)
        return np.ndarray(place.shape, place.dtype, self._map, place.offset)


@dataclass(frozen=True)
class Ready:
    """The worker's first message: its processor is loaded and one image went through it."""

    settings: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True)
class Job:
    """One image to process: what its header says, the encoded file, and the most pixels of its longer side (0: any)."""

    header: ImageHeader
    data: bytes
    max_side: int = 0


@dataclass(frozen=True)
class Done:
    """The image is processed. The tensors are in the shared memory until the next job."""

    places: list[Place]
    tensors_sha256: str
    seconds: float


@dataclass(frozen=True)
class Invalid:
    """The image cannot be rendered, see `InvalidChunk`."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class Failed:
    """The worker failed, and lives on; the text is for the log."""

    error: str
    out_of_memory: bool


def send(connection: Connection, message: Ready | Job | Done | Invalid | Failed) -> None:
    """Sends a message; `Connection.recv` reads it. `Connection.send` makes a pickler each time: five times the cost."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
