"""The progress of a fine-tuning run: its state between steps, and its line on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fovea_rollout.loop.run_state import RunState
from fovea_rollout.progress import ProgressLines


@dataclass
class FineTuneState(RunState):
    """The state of a fine-tuning run.

    Attributes:
        weights: Sampler checkpoint of the best evaluation so far; empty before the first evaluation.
        best_step: Number of steps of that checkpoint.
        best_loss: Held-out loss of that checkpoint.
        misses: Number of evaluations since then.
        is_finished: Whether training is over.
    """

    weights: str = ""
    best_step: int = 0
    best_loss: float | None = None
    misses: int = 0
    is_finished: bool = False

    def ending(self, steps: int, was_finished: bool) -> str:
        """Returns a sentence on the end of a run of `steps` steps and on the weights that it keeps.

        Args:
            steps: The number of steps of the whole run.
            was_finished: Whether the run had ended before this call, so that there was nothing to train.
        """
        end = f"finished all {steps} steps"
        if self.step < steps:
            end = f"stopped early at step {self.step} of {steps}: no better held-out loss in {self.misses} evaluations"
        kept = f"kept step {self.best_step}"
        if self.best_loss is not None:
            kept += f", which has the lowest held-out loss ({self.best_loss:.3f})"
        return f"{'nothing left to train, the run had ' if was_finished else ''}{end}; {kept}: {self.weights}"


class CheckProgress(ProgressLines):
    """The line of the rows that are checked before the first step. A context manager.

    Args:
        rows: The total number of rows.
        is_shown: Whether to show the line; see `ProgressLines` for None.
    """

    def __init__(self, rows: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._task = self._bar.add_task("check", total=rows, words="rows")

    def count_row(self) -> None:
        """Shows one more row."""
        self._bar.advance(self._task)


class FineTuneProgress(ProgressLines):
    """The line of the steps, the loss and the metrics of the last evaluation. A context manager.

    Args:
        steps: The total number of steps.
        done: The number of earlier steps.
        is_shown: Whether to show the line; see `ProgressLines` for None.
    """

    def __init__(self, steps: int, done: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._task = self._bar.add_task(
            "steps", total=steps, completed=done, words=f"resumed after step {done}" if done else ""
        )
        self._loss, self._evaluation = "", ""

    def count_step(self, step: int, loss: float) -> None:
        """Shows a step."""
        self._loss = f"loss {loss:.3f}"
        self._show(step)

    def count_evaluation(self, figures: Mapping[str, float]) -> None:
        """Shows the metrics of an evaluation."""
        self._evaluation = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        self._show(None)

    def _show(self, step: int | None) -> None:
        self._bar.update(self._task, completed=step, words=self._loss + self._evaluation)
