"""Shows the progress of a fine-tuning run on the terminal, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from fovea_rollout.progress import ProgressLines


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
