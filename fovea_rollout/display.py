"""Lines on the terminal that say how far something is."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console


class Display:
    """A bar and words a line, on standard error. Use as `with`.

    Args:
        is_shown: None for on a terminal only.
    """

    def __init__(self, is_shown: bool | None) -> None:
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description:<8}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[words]}"),
            progress.TimeElapsedColumn(),
            console=console,
            disable=not (console.is_terminal if is_shown is None else is_shown),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
