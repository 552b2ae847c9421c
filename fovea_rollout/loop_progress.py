"""Two lines that say how far a loop is."""

from __future__ import annotations

from fovea_rollout.display import Display
from fovea_rollout.step_report import StepReport
from fovea_rollout.trajectory import Trajectory


class LoopProgress(Display):
    """Steps, and the rollouts of the coming one. Use as `with`.

    Args:
        steps: In all.
        rollouts: Of one step.
        is_shown: None for on a terminal only.
    """

    def __init__(self, steps: int, rollouts: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._rollouts, self._finished, self._failed = rollouts, 0, 0
        self._steps_task = self._bar.add_task("steps", total=steps, words="")
        self._rollouts_task = self._bar.add_task("rollouts", total=rollouts, words="")

    def count_rollout(self, trajectory: Trajectory) -> None:
        """Counts one that has ended."""
        self._finished += 1
        self._failed += trajectory.end == "failed"
        self._show_rollouts()

    def count_step(self, report: StepReport) -> None:
        """Counts a step; its rollouts are off the second line, those that ran ahead stay on it."""
        self._finished -= sum(len(group) for group in report.trajectories)
        agreement = "nothing to train on" if report.agreement is None else f"kl {report.agreement.kl:.1e}"
        words = f"reward {report.reward_mean:.3f}, signal {report.signal_share:.0%}, lag {report.lag}, {agreement}"
        self._bar.update(self._steps_task, advance=1, words=words)
        self._show_rollouts()

    def _show_rollouts(self) -> None:
        words = f"{self._failed} failed"
        self._bar.update(self._rollouts_task, completed=min(self._finished, self._rollouts), words=words)
