"""Copies of the state of models in host memory: for writing it to storage, and for models that leave the device."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fovea.wire.errors import FoveaError
from fovea_trainer.ranks.control_group import error_of_rank

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


class HostCopies:
    """Copies of tensors on the host, in a reused buffer. On a GPU they are made while the device continues to compute.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._owner = ""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[Tensor], owner: str) -> list[Tensor]:
        """Copies tensors as they are after all device work queued so far. The copies are valid until the next call.

        On a GPU the copies are asynchronous: call `wait` before reading them.

        Args:
            tensors: Tensors on the device.
            owner: Id of the model to which they belong, for `before_writing`.

        Returns:
            One host tensor per input, with the same shape and dtype.
        """
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._stream is not None)
        parts = torch.split(self._memory[: sum(sizes)], sizes)
        copies = [
            part[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for part, t in zip(parts, tensors, strict=True)
        ]
        if self._stream is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            return copies
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
        self._copied, self._owner = self._stream.record_event(), owner
        return copies

    def before_writing(self, owner: str) -> None:
        """Waits until the copies of one model are made. Call it before you change or free the copied tensors.

        Commands of other models do not wait.
        """
        if self._copied is not None and self._owner == owner:
            self._copied.synchronize()

    def fetched(self, tensor: Tensor) -> Tensor:
        """Returns one tensor on the host. Waits for this copy without delaying others. Callable from any thread."""
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def wait(self) -> None:
        """Waits until the copies are complete. Callable from any thread."""
        if self._copied is not None:
            self._copied.synchronize()


class SaveThread:
    """The thread of rank 0 that writes saved states and snapshots, while commands run.

    Args:
        device: Device of rank 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies = HostCopies(device)
        """The buffer of the state that is being saved."""
        self._thread = ThreadPoolExecutor(1, "saves")

    def submit(self, write: Callable[[], int]) -> "Future[int]":
        """Runs `write` after all writes that were submitted before it. The future has only FoveaErrors."""
        return self._thread.submit(_without_foreign_errors, write)

    def close(self) -> None:
        """Waits for pending writes and stops the thread."""
        self._thread.shutdown()


def _without_foreign_errors(write: Callable[[], int]) -> int:
    try:
        return write()
    except FoveaError:
        raise
    except Exception as failure:
        logger.exception("a save failed")
        raise error_of_rank(0, failure) from failure
