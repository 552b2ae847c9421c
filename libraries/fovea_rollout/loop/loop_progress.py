"""Shows the progress of a training loop on the terminal, in two lines."""

from __future__ import annotations

from collections.abc import Sequence

from fovea_rollout.loop.step_report import StepReport
from fovea_rollout.progress import ProgressLines
from fovea_rollout.trajectory import Trajectory


class LoopProgress(ProgressLines):
    """Lines of the steps, and of the rollouts for the next step. A context manager.

    Args:
        steps: The total number of steps.
        rollouts: The number of rollouts of one step.
        is_shown: Whether to show the lines; see `ProgressLines` for None.
        taken: The number of steps that a resumed run has already taken.
    """

    def __init__(self, steps: int, rollouts: int, is_shown: bool | None, taken: int = 0) -> None:
        super().__init__(is_shown)
        self._rollouts, self._finished = rollouts, 0
        self._failed: set[str] = set()
        self._has_traced = is_shown is False
        self._steps_task = self._bar.add_task("steps", total=steps, completed=taken, words="")
        self._held_out = ""
        self._rollouts_task = self._bar.add_task("rollouts", total=rollouts, words="")

    def count_rollout(self, trajectory: Trajectory) -> None:
        """Counts a finished rollout."""
        self._finished += 1
        if trajectory.end == "failed":
            self._failed.add(trajectory.conversation)
        self._show_rollouts()

    def _trace(self, report: StepReport) -> None:
        """Prints the traceback of the run's first failure that has one. `report.failures` has all of them."""
        for conversation, failure in () if self._has_traced else report.failures:
            if failure.traceback:
                self._has_traced = True
                said = f"rollout {conversation} failed in {failure.stage} (`report.failures` has all tracebacks):"
                self._bar.console.out(f"{said}\n{failure.traceback}", highlight=False)
                return

    def discount(self, trajectories: Sequence[Trajectory]) -> None:
        """Removes the finished rollouts of a cancelled group, or of a group of a finished step."""
        self._finished -= len(trajectories)
        self._failed -= {one.conversation for one in trajectories}
        self._show_rollouts()

    def count_step(self, report: StepReport) -> None:
        """Counts a step. Removes its rollouts from the second line; rollouts for later steps stay there."""
        for group in report.trajectories:
            self.discount(group)
        self._trace(report)
        agreement = "nothing to train on" if report.agreement is None else f"kl {report.agreement.kl:.1e}"
        if report.evaluation is not None:
            self._held_out = f", held out {report.evaluation.reward_mean:.3f}"
        reward = f"reward {report.reward_mean:.3f}{self._held_out}"
        # Some fail only when they are trained on, and were counted as played.
        failed = f", {len(report.failures)} failed" if report.failures else ""
        words = f"{reward}, signal {report.signal_share:.0%}, lag {report.lag}, {agreement}{failed}"
        self._bar.update(self._steps_task, advance=1, words=words)

    def _show_rollouts(self) -> None:
        words = f"{len(self._failed)} failed"
        self._bar.update(self._rollouts_task, completed=min(self._finished, self._rollouts), words=words)


class WarmUpProgress(ProgressLines):
    """The line of the steps of a warm-up. A context manager.

    Args:
        steps: The total number of steps.
        is_shown: Whether to show the line; see `ProgressLines` for None.
    """

    def __init__(self, steps: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._task = self._bar.add_task("warm-up", total=steps, words="")

    def count_step(self) -> None:
        """Shows one more step."""
        self._bar.advance(self._task)
