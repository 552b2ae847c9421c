"""Shows progress on standard error: bars on a terminal, and elsewhere plain lines, less often the longer it takes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, SamplingSettings
from fovea_rollout.trajectory import Trajectory

_FIRST_S = 5.0
_PLAIN_S = 30.0
"""The most seconds between two plain lines, so that the log of a job shows that it lives, and where."""


class ProgressLines:
    """Lines with a bar and text on standard error. A context manager.

    Args:
        is_shown: Whether to show bars. None shows them on a terminal; elsewhere it prints a plain line of each bar
            after 5 seconds, and then less often, down to every half minute.
    """

    def __init__(self, is_shown: bool | None) -> None:
        console = Console(stderr=True)
        self._is_plain = is_shown is None and not console.is_terminal
        self._is_over, self._has_said = threading.Event(), False
        self._saying = threading.Thread(target=self._say_regularly, name="progress", daemon=True)
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
        if self._is_plain:
            self._saying.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._is_plain:
            self._is_over.set()
            self._saying.join()
            if self._has_said:
                self._say()  # where it ended

    def _say_regularly(self) -> None:
        begun = time.monotonic()
        while not self._is_over.wait(min(_PLAIN_S, max(_FIRST_S, (time.monotonic() - begun) / 2))):
            self._say()

    def _say(self) -> None:
        self._has_said = True
        for task in self._bar.tasks:
            words = f", {task.fields['words']}" if task.fields["words"] else ""
            line = f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}{words}, {task.elapsed or 0:.0f} s"
            print(line, file=sys.stderr, flush=True)


class BatchProgress(ProgressLines):
    """A policy that counts its samples and shows the count. A context manager.

    Args:
        policy: The policy that samples.
        total: The number of rollouts.
        is_shown: Whether to show the line; see `ProgressLines` for None.
    """

    def __init__(self, policy: Policy, total: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._policy, self._failed, self._turns, self._tokens = policy, 0, 0, 0
        self._task = self._bar.add_task("rollouts", total=total, words="")

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`."""
        sampled = await self._policy.sample(prompt, settings, stop_ids, conversation)
        self._turns += 1
        self._tokens += len(sampled.ids)
        self._show()
        return sampled

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)

    def count(self, trajectory: Trajectory) -> None:
        """Counts a finished rollout."""
        self._failed += trajectory.end == "failed"
        self._bar.advance(self._task)
        self._show()

    def _show(self) -> None:
        seconds = self._bar.tasks[0].elapsed or 0.0
        rate = self._tokens / seconds if seconds else 0.0
        words = f"{self._failed} failed, {self._turns} turns, {rate:.0f} tokens/s"
        self._bar.update(self._task, words=words)
