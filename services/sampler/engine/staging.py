"""Where a snapshot waits until it is whole: on the GPU if there is room, else in pinned host memory.

Full weights from pinned memory stop sampling for the time that the bus takes; from ordinary memory, which the driver
copies through a small buffer of its own, for over a second for 9 GB (measured), and launches of the engine wait the
while. Pinned memory costs no KV cache. The first push that needs it allocates it, and torch keeps it for the next.
"""

import logging

import torch

logger = logging.getLogger(__name__)

_WORKING_BYTES = 2 * 2**30


class Staging:
    """Finds a place for what arrives on one device.

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
                    "snapshots wait in ordinary host memory, and full weights stop sampling for about 0.13 s a GB: "
                    "memory cannot be pinned (%s). Allow more locked memory, or leave room on the GPU by a smaller "
                    "--gpu-memory-fraction",
                    error,
                )
        return buffer.to("cpu")
