"""Where a run of fine-tuning is."""

from __future__ import annotations

from dataclasses import dataclass

from fovea_rollout.run_state import RunState


@dataclass
class FineTuneState(RunState):
    """Where a run of fine-tuning is.

    Attributes:
        weights: Checkpoint to sample from, of the best evaluation until now; empty before the first one.
        best_step: Steps that it has taken.
        best_loss: Its held-out loss.
        misses: Evaluations since then, none of which was better.
        is_finished: Whether training is over.
    """

    weights: str = ""
    best_step: int = 0
    best_loss: float | None = None
    misses: int = 0
    is_finished: bool = False
