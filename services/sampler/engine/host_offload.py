"""From the GPU to host memory, without holding the engine up."""

import logging
import threading
from typing import Any

import torch

logger = logging.getLogger(__name__)

# What kernels and torch's allocator may still ask for while a snapshot waits on the GPU.
_WORKING_BYTES = 2 * 2**30
# Large enough that the bus is busy, small enough to stay pinned for good.
_PIECE_BYTES = 32 * 2**20


class SnapshotOffload:
    """Finds a place where what arrives waits until it is whole: on the device if there is room, else in pinned memory.

    Full weights from pinned memory stop sampling for the time that the bus takes; from ordinary memory, which the
    driver copies through a small buffer of its own, for over a second for 9 GB (measured), and launches of the engine
    wait the while. Pinned memory costs no KV cache. The first push that needs it allocates it, and torch keeps it for
    the next.

    Args:
        device: Where broadcasts arrive.
        working_bytes: GPU memory that must stay free beside what waits.
    """

    def __init__(self, device: torch.device, working_bytes: int = _WORKING_BYTES) -> None:
        self._device = device
        self._working_bytes = working_bytes
        self._can_pin = device.type == "cuda"

    def fits(self, size_bytes: int) -> bool:
        """Whether that much may wait on the device itself."""
        if self._device.type != "cuda":
            return True
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes > size_bytes + self._working_bytes

    def to_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy of uint8 [n] in host memory, whole once the current stream has come to here."""
        if self._can_pin:
            try:
                pinned = torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True)
                return pinned.copy_(buffer, non_blocking=True)
            except RuntimeError as error:  # locked memory is limited, or there is none left
                self._can_pin = False
                logger.warning(
                    "snapshots wait in ordinary host memory, and full weights stop sampling for about 0.13 s per GB: "
                    "memory cannot be pinned (%s). Allow more locked memory, or leave room on the GPU by a smaller "
                    "--gpu-memory-fraction",
                    error,
                )
        return buffer.to("cpu")


class HostCopier:
    """Copies through one small buffer that the GPU writes to by itself.

    A plain `tensor.cpu()` of an adapter keeps the driver busy, and every kernel launch of the engine waits: a second of
    standstill for 1 GB, measured.

    Args:
        device: Where tensors come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in ordinary host memory. What made it must be done; safe to use from several threads."""
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        copy = torch.empty(source.numel(), dtype=torch.uint8)
        with self._lock, torch.cuda.stream(self._stream):
            for part, place in zip(torch.split(source, _PIECE_BYTES), torch.split(copy, _PIECE_BYTES), strict=True):
                pinned = self._buffer[: part.numel()]
                pinned.copy_(part, non_blocking=True)
                self._stream.synchronize()
                place.copy_(pinned)
        return copy.view(tensor.dtype).view(tensor.shape)
