"""How far a step of several substeps may move the model: its learning rate follows what the last one did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST = 0.25
"""Of the rate: what a model does in its first step at the whole rate can lose all that its warm-up taught."""
_LEAST, _SMALLEST_FACTOR, _LARGEST_FACTOR = 0.01, 1 / 3, 1.2


@dataclass
class StepSize:
    """The share of the learning rate that steps get, so that each moves the model by about `target`.

    PPO's clip stops a token's gradient once the token has moved far enough; it does not stop what other tokens'
    gradients do to it, which with long answers is most of it. Near where it begins, a step's KL grows with the square
    of its rate, so the share is multiplied by sqrt(target / moved), within bounds. Such a rate is the `adaptive` one of
    https://arxiv.org/abs/2109.11978 (it goes by fixed factors); PPO adapts its KL penalty likewise
    (https://arxiv.org/abs/1707.06347, section 4).

    Attributes:
        target: In nats per token; None leaves the rate as it is.
        share: 0.01 to 1.
    """

    target: float | None
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.share = 1.0 if self.target is None else FIRST

    def observe(self, moved_kl: float | None) -> None:
        """Takes the KL that a step moved the model by; None, which one substep tells, changes nothing."""
        if self.target is None or moved_kl is None:
            return
        factor = math.sqrt(self.target / max(moved_kl, 1e-12))
        factor = min(max(factor, _SMALLEST_FACTOR), _LARGEST_FACTOR)
        self.share = min(max(self.share * factor, _LEAST), 1.0)
