"""Progress on the terminal: one line for a batch of rollouts, two lines for a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import progress
from rich.console import Console

from fovea_rollout.messages import Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings
from fovea_rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from fovea_rollout.step_report import StepReport


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


class LoopProgress(ProgressLines):
    """Lines of the steps, and of the rollouts for the next step. A context manager.

    Args:
        steps: The total number of steps.
        rollouts: The number of rollouts of one step.
        is_shown: Whether to show the lines; None shows them on a terminal only.
        taken: The number of steps that a resumed run has already taken.
    """

    def __init__(self, steps: int, rollouts: int, is_shown: bool | None, taken: int = 0) -> None:
        super().__init__(is_shown)
        self._rollouts, self._finished = rollouts, 0
        self._failed: set[str] = set()
        self._steps_task = self._bar.add_task("steps", total=steps, completed=taken, words="")
        self._held_out = ""
        self._rollouts_task = self._bar.add_task("rollouts", total=rollouts, words="")

    def count_rollout(self, trajectory: Trajectory) -> None:
        """Counts a finished rollout."""
        self._finished += 1
        self._note_failures([trajectory])
        self._show_rollouts()

    def count_step(self, report: StepReport) -> None:
        """Counts a step. Removes its rollouts from the second line, on which rollouts for later steps stay."""
        self._finished -= sum(len(group) for group in report.trajectories)
        for group in report.trajectories:  # some rollouts fail only when they are trained on
            self._note_failures(group)
        agreement = "nothing to train on" if report.agreement is None else f"kl {report.agreement.kl:.1e}"
        if report.evaluation is not None:
            self._held_out = f", held out {report.evaluation.reward_mean:.3f}"
        reward = f"reward {report.reward_mean:.3f}{self._held_out}"
        words = f"{reward}, signal {report.signal_share:.0%}, lag {report.lag}, {agreement}"
        self._bar.update(self._steps_task, advance=1, words=words)
        self._show_rollouts()

    def _note_failures(self, trajectories: Sequence[Trajectory]) -> None:
        self._failed |= {one.conversation for one in trajectories if one.end == "failed"}

    def _show_rollouts(self) -> None:
        words = f"{len(self._failed)} failed"
        self._bar.update(self._rollouts_task, completed=min(self._finished, self._rollouts), words=words)
