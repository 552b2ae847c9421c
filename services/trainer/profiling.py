"""What the device of rank 0 did during some commands: kernels by time, and when it stood still."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from services.trainer.commands import Command, ForwardBackward, OptimStep

logger = logging.getLogger(__name__)

COMMANDS = 4
"""How many are looked at, and what came between them."""
_ROWS = 40
_GAPS = 20


class CommandProfiler:
    """Writes `profile.txt` and `trace.json.gz` into a directory, once.

    Args:
        directory: Made if it is not there; None looks at nothing.
        first: The first forward_backward or optim_step to look at, counted from 1.
    """

    def __init__(self, directory: Path | None, first: int) -> None:
        self._directory = directory
        self._first = first
        self._count = 0
        on_gpu = torch.cuda.is_available()
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    @contextmanager
    def around(self, command: Command) -> Iterator[None]:
        """To be entered around each command, in the thread that runs it."""
        if self._directory is None or not isinstance(command, ForwardBackward | OptimStep):
            yield
            return
        self._count += 1
        if self._count == self._first:
            self._profile.start()
        try:
            yield
        finally:
            if self._count == self._first + COMMANDS - 1:
                self._profile.stop()
                self._write(self._directory)

    def _write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=key, row_limit=_ROWS, max_name_column_width=100)
        busy = "\n".join(busy_lines(kernel_times(self._profile.events())))
        (directory / "profile.txt").write_text(f"{busy}\n\n{table}\n")
        self._profile.export_chrome_trace(str(directory / "trace.json.gz"))
        logger.info("wrote what the device did during %d commands to %s", COMMANDS, directory)


def kernel_times(events: Any) -> list[tuple[float, float, str]]:
    """Begin and end in microseconds, and name, of all that ran on a GPU."""
    found = (event for event in events if event.device_type.name == "CUDA")
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in found)


def busy_lines(kernels: list[tuple[float, float, str]]) -> list[str]:
    """The share of time in which anything ran, and the longest gaps, from kernels in order of their begin."""
    if not kernels:
        return ["nothing ran on a GPU"]
    begun, until, before = kernels[0]
    busy, gaps = until - begun, []
    for start, end, name in kernels[1:]:
        if start > until:
            gaps.append((start - until, until - begun, before, name))
        busy += max(0.0, end - max(start, until))
        if end > until:
            until, before = end, name
    lines = [f"busy {busy / 1e3:.1f} of {(until - begun) / 1e3:.1f} ms, {busy / (until - begun):.1%}; longest gaps:"]
    for gap, at, last, following in sorted(gaps, reverse=True)[:_GAPS]:
        lines.append(f"{gap / 1e3:8.2f} ms at {at / 1e3:9.1f} ms, between {last[:60]} and {following[:60]}")
    return lines
