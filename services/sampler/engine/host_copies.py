"""Copies from the GPU to the host that do not hold the engine up."""

import threading
from typing import Any

import torch

_PIECE_BYTES = 32 * 2**20


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
