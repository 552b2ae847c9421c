"""Shows the progress of a batch of rollouts on the terminal, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, SamplingSettings
from fovea_rollout.trajectory import Trajectory


class ProgressLines:
    """Lines with a bar and text on standard error. A context manager.

    Args:
        is_shown: Whether to show the lines; None shows them on a terminal only.
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


class BatchProgress(ProgressLines):
    """A policy that counts its samples and shows the count. A context manager.

    Args:
        policy: The policy that samples.
        total: The number of rollouts.
        is_shown: Whether to show the line; None shows it on a terminal only.
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
