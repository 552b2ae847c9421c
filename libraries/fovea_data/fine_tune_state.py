"""The state of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass

from fovea_rollout.loop.run_state import RunState


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
