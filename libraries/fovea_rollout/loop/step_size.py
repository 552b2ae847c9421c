"""Adapts the learning rate of steps with several substeps to how far the last step moved the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST = 0.25
"""Share of the rate in the first step. A first step at the whole rate can undo the whole warm-up."""
_LEAST, _SMALLEST_FACTOR, _LARGEST_FACTOR = 0.01, 1 / 3, 1.2


@dataclass
class StepSize:
    """The share of the learning rate with which a step moves the model by about `target`.

    PPO's clip stops a token's gradient once the token has moved far enough. It does not stop the effect of other
    tokens' gradients on that token, which dominates in long answers. For small rates, a step's KL grows with the square
    of the rate, so the share is multiplied by sqrt(target / moved), within bounds. This is like the `adaptive` rate of
    https://arxiv.org/abs/2109.11978, which uses fixed factors, and like PPO's adaptive KL penalty
    (https://arxiv.org/abs/1707.06347, section 4).

    Attributes:
        target: Target KL of a step in nats per token; None keeps the whole rate.
        share: Share of the next step, 0.01 to 1.
    """

    target: float | None
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.share = 1.0 if self.target is None else FIRST

    def observe(self, moved_kl: float | None) -> None:
        """Updates the share with the KL by which a step moved the model; None (from one substep) changes nothing."""
        if self.target is None or moved_kl is None:
            return
        factor = math.sqrt(self.target / max(moved_kl, 1e-12))
        factor = min(max(factor, _SMALLEST_FACTOR), _LARGEST_FACTOR)
        self.share = min(max(self.share * factor, _LEAST), 1.0)
