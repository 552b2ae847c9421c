"""Where full weights wait until they are whole; from the GPU to host memory, without holding the engine up."""

import logging
import threading
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

# What kernels and torch's allocator may still ask for while a snapshot waits on the GPU.
_WORKING_BYTES = 2 * 2**30
# Of the memory that would be KV cache, the most that "auto" keeps free for a snapshot.
_MOST_OF_CACHE = 1 / 3
# Large enough that the bus is busy, small enough to stay pinned for good.
_PIECE_BYTES = 32 * 2**20


def room_for_pushes(
    wanted: Literal["auto", "always", "never"], weights_bytes: int, engine_bytes: int, tensor_parallel: int
) -> int:
    """Bytes of each GPU that the KV cache must leave free so that full weights can wait there; 0 to leave none.

    Args:
        wanted: As the setting `full_push_room` has it.
        weights_bytes: Of the whole model: each worker receives all of it.
        engine_bytes: What the engine may take of each GPU.
        tensor_parallel: GPUs that share the model.

    Raises ValueError if `always` leaves no cache.
    """
    room = weights_bytes + _WORKING_BYTES
    cache = engine_bytes - weights_bytes // tensor_parallel
    if wanted == "always" and room >= cache:
        raise ValueError(
            f"--full-push-room always takes {room / 2**30:.1f} GiB of each GPU, and beside the model the engine has "
            f"{cache / 2**30:.1f}: take auto or never, a larger --gpu-memory-fraction, or more GPUs"
        )
    return room if wanted == "always" or (wanted == "auto" and room <= cache * _MOST_OF_CACHE) else 0


class SnapshotOffload:
    """Finds a place where what arrives waits until it is whole: on the device if there is room, else in pinned memory.

    Full weights from pinned memory stop sampling for the time that the bus takes; from ordinary memory, which the
    driver copies through a small buffer of its own, for over a second for 9 GB (measured), and launches of the engine
    wait the while. Pinned memory costs no KV cache. The first push that needs it allocates it, and torch keeps it for
    the next.

    Args:
        device: Where broadcasts arrive.
        stream: On which they do; None on a CPU.
        working_bytes: GPU memory that must stay free beside what waits.
    """

    def __init__(self, device: torch.device, stream: Any = None, working_bytes: int = _WORKING_BYTES) -> None:
        self._device = device
        self._stream = stream
        self._working_bytes = working_bytes
        self._can_pin = device.type == "cuda"

    def fits(self, size_bytes: int) -> bool:
        """Whether that much may wait on the device itself."""
        if self._device.type != "cuda":
            return True
        lacking_bytes = size_bytes + self._working_bytes - torch.cuda.mem_get_info(self._device)[0]
        return lacking_bytes < 0 or lacking_bytes < self._left_bytes()

    def _left_bytes(self) -> int:
        """What earlier snapshots took, and torch keeps for the next ones on their stream."""
        own = self._device.index, getattr(self._stream, "cuda_stream", None)
        segments: list[Any] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            one["total_size"] - one["allocated_size"] for one in segments if (one["device"], one["stream"]) == own
        )

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
                    "memory cannot be pinned (%s). Allow more locked memory, or leave room on the GPU by "
                    "--full-push-room always",
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
