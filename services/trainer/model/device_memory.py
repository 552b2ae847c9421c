"""How much memory a rank has left on its device, and what running out of it looks like."""

import ctypes
import gc
from pathlib import Path

import torch

UNLIMITED = 2**62
"""Bytes, where nothing is known of a limit."""

_PAGE_BYTES = 4096
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")


class DeviceMemory:
    """The memory of one rank's device.

    Args:
        device: Where the rank computes.
        limit_bytes: The most that this rank may take: of a GPU, of torch's; of a CPU, of the whole process. 0 for what
            the GPU has; on a CPU for no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self._limit_bytes = limit_bytes

    @property
    def is_known(self) -> bool:
        """Whether there is anything to count against."""
        return self.device.type != "cpu" or self._limit_bytes > 0

    def free_bytes(self) -> int:
        """What nobody has taken; of a GPU, what torch has taken here but does not use counts too."""
        if self.device.type == "cpu":
            return self._limit_bytes - _resident_bytes() if self._limit_bytes else UNLIMITED
        used_bytes = torch.cuda.memory_allocated(self.device)
        unused_bytes = torch.cuda.memory_reserved(self.device) - used_bytes
        free_bytes = int(torch.cuda.mem_get_info(self.device)[0] + unused_bytes)
        return min(free_bytes, self._limit_bytes - used_bytes) if self._limit_bytes else free_bytes

    def collect(self) -> None:
        """Gives back what is no longer used: dropped tensors, and pieces that torch keeps but cannot join."""
        gc.collect()
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
        else:
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory. Of a CPU torch says so with a RuntimeError, as cuBLAS does."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def host_free_bytes() -> int:
    """What this machine, or the container that this process is in, has left."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        most, now = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except OSError:  # no container, or an old one
        return free_bytes
    return free_bytes if most == "max" else min(free_bytes, int(most) - int(now) + int(cached["inactive_file"]))


def mib(size_bytes: int) -> str:
    """For messages: `1,024 MiB`."""
    return f"{max(size_bytes, 0) / 2**20:,.0f} MiB"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
