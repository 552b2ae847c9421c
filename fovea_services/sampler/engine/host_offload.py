"""Chooses the memory for arriving snapshots, and copies from GPU to host without delaying the engine."""

import logging
import threading
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

# Memory that kernels and torch's allocator may still request while a snapshot waits on the GPU.
_WORKING_BYTES = 2 * 2**30
# The largest fraction of the KV cache's memory that "auto" reserves for a snapshot.
_MOST_OF_CACHE = 1 / 3
# Large enough to keep the bus busy, small enough to stay pinned permanently.
_PIECE_BYTES = 32 * 2**20


def room_for_pushes(
    wanted: Literal["auto", "always", "never"], weights_bytes: int, engine_bytes: int, tensor_parallel: int
) -> int:
    """Returns the bytes of each GPU that the KV cache must leave free for arriving full weights; 0 to reserve none.

    Args:
        wanted: The setting `full_push_room`.
        weights_bytes: Bytes of the whole model: each worker receives all of it.
        engine_bytes: Bytes of each GPU that the engine may use.
        tensor_parallel: GPUs over which the model is split.

    Raises ValueError if `always` would leave no KV cache.
    """
    room = weights_bytes + _WORKING_BYTES
    cache = engine_bytes - weights_bytes // tensor_parallel
    if wanted == "always" and room >= cache:
        raise ValueError(
            f"--full-push-room always needs {room / 2**30:.1f} GiB of each GPU, but beside the model the engine has "
            f"{cache / 2**30:.1f} GiB: use auto or never, a larger --gpu-memory-fraction, or more GPUs"
        )
    return room if wanted == "always" or (wanted == "auto" and room <= cache * _MOST_OF_CACHE) else 0


class SnapshotOffload:
    """Chooses the memory of an arriving snapshot: the device if there is room, else pinned host memory.

    Loading full weights from pinned memory pauses sampling for the transfer time of the bus. Loading them from ordinary
    memory, which the driver copies through a small buffer of its own, pauses sampling for over a second for 9 GB
    (measured), because the engine's kernel launches wait meanwhile. Pinned memory costs no KV cache. The first push
    that needs pinned memory allocates it, and torch caches it for later pushes.

    Args:
        device: The device on which broadcasts arrive.
        stream: The CUDA stream on which they arrive; None on a CPU.
        working_bytes: GPU memory that must stay free beside an arriving snapshot.
    """

    def __init__(self, device: torch.device, stream: Any = None, working_bytes: int = _WORKING_BYTES) -> None:
        self._device = device
        self._stream = stream
        self._working_bytes = working_bytes
        self._can_pin = device.type == "cuda"

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

    def to_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `buffer`, uint8 [n], in host memory.

        It is complete once the current stream reaches here.
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


class HostCopier:
    """Copies tensors from a GPU to host memory through one small pinned buffer.

    A plain `tensor.cpu()` of an adapter keeps the driver busy, so that every kernel launch of the engine waits: a pause
    of one second for 1 GB (measured). Into pinned memory the GPU writes by itself.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the tensor in ordinary host memory. It may be called from several threads.

        The kernels that write `tensor` must have finished: the copy runs on a stream that does not wait for them.
        """
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        copy = torch.empty(source.numel(), dtype=torch.uint8)
        with self._lock, torch.cuda.stream(self._stream):
            for part, place in zip(torch.split(source, _PIECE_BYTES), torch.split(copy, _PIECE_BYTES), strict=True):
                pinned = self._buffer[: part.numel()]
                pinned.copy_(part, non_blocking=True)
                self._stream.synchronize()
                place.copy_(pinned)
        return copy.view(tensor.dtype).view(tensor.shape)
